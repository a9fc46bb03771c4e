"""Kernels for CUDA, by Triton, and by FlashAttention-3 if it is installed.

Entry point: `operators`.
Imports: device, kernels, kernels.lora.
"""
