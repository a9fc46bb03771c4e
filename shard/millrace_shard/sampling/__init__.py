"""Sampling: logits processors, warpers and the choice of tokens.

Entry point: `sampler.Sampler`.
May import: kernels, device.
"""
