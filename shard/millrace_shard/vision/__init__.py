"""Reads images: their pixels by slot, and the encoder that turns these into features of the language model.

Entry points: `encoder.ImageEncoder`, `encoder.load_vision`, `registry.read_vision`; pages of families.
Imports: arrays, batch, device, errors, kernels, models, models.families, weights, weights.gguf.
"""
