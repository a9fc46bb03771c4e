"""Kernels for CUDA, by Triton, and by FlashAttention-3 if it is installed.

Entry point: `operators`.
May import: kernels, device; never kernels.cpu.
"""
