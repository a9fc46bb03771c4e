"""Models on paged KV: one decoder for the Llama family, a backend for transformers' classes.

Entry points: `interface.CausalModel`, `load.load_model`.
May import: model_loader, kernels, device.
"""
