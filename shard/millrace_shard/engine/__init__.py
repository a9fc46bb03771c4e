"""The engine thread, which owns device, model and batch; epochs, warm-up and KV capacity.

Entry points: `engine.Engine`, `warmup.warm_up`.
Imports: adapters, batch, device, errors, kernels, kernels.lora, millrace_proto, model_runner, models, sampling,
speculation, structured_output, vision.
"""
