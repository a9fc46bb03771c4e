"""Sampling: logits processors, warpers and the choice of tokens.

Entry point: `sampler.Sampler`.
Imports: arrays, device, kernels, millrace_proto.
"""
