"""Triton kernels, and FlashAttention-3 where it is installed.

Entry point: `operators`.
May import: kernels, device; never kernels.cpu.
"""
