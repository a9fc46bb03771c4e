"""Runs classes of `transformers` on our paged KV cache.

Entry points: `transformers_loader.TransformersLoader`, `transformers_model.TransformersModel`.
Imports: device, errors, kernels, kernels.cpu, kernels.lora, models, weights.
"""
