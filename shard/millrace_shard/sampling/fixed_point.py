"""Probabilities as integers: sums are exact in any order, so bits do not depend on threads, tiles or other rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.kernels.sampling_kernels import SCALE_BITS as SCALE_BITS

BLOCK = 512


def fixed_point(values: Tensor) -> Tensor:
    """Convert [n, V] float32 in [0, 1] to int64 in [0, 2**SCALE_BITS], rounded down."""
    return (values * float(1 << SCALE_BITS)).to(torch.int64)


def entropy(probabilities: Tensor, log_probabilities: Tensor) -> Tensor:
    """Entropy of each row in nats, [n, 1] float32."""
    terms = torch.where(probabilities > 0, -probabilities * log_probabilities, 0.0)
    return fixed_point(terms).sum(-1, keepdim=True).to(torch.float32) / float(1 << SCALE_BITS)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row, drawn with probability proportional to its weight; an index of weight 0 is never drawn.

    `weights` [n, V] int64, `uniforms` [n] int64 of UNIFORM_BITS bits; the cumulative sum runs in index order. A row
    whose weights are all 0 yields an arbitrary index.
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


def draw_from(scores: Tensor, size: int, uniforms: Tensor) -> Tensor:
    """One of the first `size` ids of each row of `scores` [n, W] float32, drawn by probability; see `draw`."""
    return draw(fixed_point(scores.softmax(-1)[:, :size]), uniforms)


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
UNIFORM_BITS = 24


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """One integer of `UNIFORM_BITS` bits for each (seed, position): the top bits of splitmix64's output.

    `positions` are the absolute indexes, in their sequences, of the tokens to be sampled.
    """
    z = seeds + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    bits: NDArray[np.int64] = (z >> np.uint64(64 - UNIFORM_BITS)).astype(np.int64)
    return bits
