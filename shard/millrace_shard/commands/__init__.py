"""The commands of `millrace-shard`.

Entry point of each: `main`.
Imports: adapters, config, device, engine, errors, kernels, kernels.cpu, kernels.lora, logs, millrace_proto,
model_runner, models, process, sampling, server, speculation, structured_output, variables, vision, weights,
weights.gguf, weights.quantized.
"""
