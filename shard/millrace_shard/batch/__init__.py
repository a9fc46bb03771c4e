"""The state of running sequences, and the layout of a step over it.

Entry points: `batch.Batch`, `step.Step`.
Imports: adapters, arrays, device, errors, kernels, kernels.lora, millrace_proto, sampling.
"""
