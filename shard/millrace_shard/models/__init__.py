"""Models over a paged KV cache: a decoder for the Llama family, and a backend for transformers' classes.

Entry points: `interface.CausalModel`, `load.load_model`.
May import: weights, kernels, device.
"""
