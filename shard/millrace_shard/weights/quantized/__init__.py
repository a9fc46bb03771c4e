"""Quantised checkpoints: which method a folder has, and a rank's linears as codes with scales.

Entry points: `quantization_config.read_quantization`, `linear_reader.LinearReader`, `made_at_load.made_at_load`.
Imports: errors, kernels, weights, weights.gguf.
"""
