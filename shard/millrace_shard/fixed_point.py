"""Probabilities as integers: their sums are exact in any order, so bits depend on no thread, tile or batch mate."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.randomness import UNIFORM_BITS

SCALE_BITS = 38
"""A whole distribution times a uniform of 24 bits still fits into 63."""
BLOCK = 512


def fixed_point(values: Tensor) -> Tensor:
    """[n, V] float32 in [0, 1] to int64 in [0, 2**SCALE_BITS], rounded down."""
    return (values * float(1 << SCALE_BITS)).to(torch.int64)


def entropy(probabilities: Tensor, log_probabilities: Tensor) -> Tensor:
    """Entropy of each row in nats, [n, 1] float32."""
    terms = torch.where(probabilities > 0, -probabilities * log_probabilities, 0.0)
    return fixed_point(terms).sum(-1, keepdim=True).to(torch.float32) / float(1 << SCALE_BITS)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index a row, with probability proportional to its weight; indexes without weight are never drawn.

    `weights` [n, V] int64, `uniforms` [n] int64 of UNIFORM_BITS bits; the cumulative sum runs in
    index order. A row without any weight yields some index.
    """
    num_rows, size = weights.shape
    padding = -size % BLOCK
    whole = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    blocks = whole.view(num_rows, whole.shape[1] // BLOCK, BLOCK)
    sums = blocks.sum(-1)
    ends = sums.cumsum(-1)
    target = (uniforms * ends[:, -1]) >> UNIFORM_BITS
    block = (ends <= target[:, None]).sum(-1).clamp_(max=ends.shape[1] - 1)
    row = torch.arange(num_rows, device=weights.device)
    rest = target - (ends[row, block] - sums[row, block])
    inside = (blocks[row, block].cumsum(-1) <= rest[:, None]).sum(-1)
    return (block * BLOCK + inside).clamp_(max=size - 1)
