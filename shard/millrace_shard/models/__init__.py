"""Models over a paged KV cache: a decoder for the Llama family, and a backend for transformers' classes.

Entry points: `interface.CausalModel`, `load.load_model`.
Imports: device, errors, kernels, kernels.lora, models.families, models.transformers_backend, weights, weights.gguf,
weights.quantized.
"""
