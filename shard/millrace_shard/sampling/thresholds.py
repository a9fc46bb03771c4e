"""Probabilities as integers, and the threshold of a row: the smallest key to keep.

Weights are integers, whose sums are exact in any order, so all implementations find the same threshold.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.device import transfers
from millrace_shard.kernels.scores import SCALE_BITS as SCALE_BITS

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


NUM_BUCKETS = 4096
BUCKETS_PER_UNIT = 64
"""Keys are roughly logarithms of probabilities: 64 units below the best key, all weights are 0."""
MOST_SORTED = 2048
"""On CPU, rows of up to this many keys are sorted; longer rows are put into buckets."""


def find_threshold(keys: Tensor, probabilities: Tensor | None, limit: Tensor, /) -> Tensor:
    """The threshold in plain torch; see kernels.sampling_kernels.FindThreshold."""
    if probabilities is None:
        weights, budget = torch.ones_like(limit).expand(keys.shape), limit
    else:
        weights = fixed_point(probabilities)
        budget = budget_of(weights, limit)
    if keys.shape[1] > MOST_SORTED and transfers.is_synchronous(keys.device):
        return threshold_by_buckets(keys, weights, budget)
    return threshold_by_sorting(keys, weights, budget)


def budget_of(weights: Tensor, mass: Tensor) -> Tensor:
    """The share `mass` [n, 1] of the sum of each row's weights [n, V] int64: [n, 1] int64, rounded up, at least 1."""
    total = weights.sum(-1, keepdim=True)
    return (mass.double() * total.double()).ceil().to(torch.int64).clamp_(min=1)


def threshold_by_sorting(keys: Tensor, weights: Tensor, budget: Tensor) -> Tensor:
    """The smallest key to keep of each row by a sort, [n, 1]; a key that keeps all where the budget is not reached.

    `keys` [n, V] float32 without NaN; `weights` [n, V] int64, at least 0, with a sum below 2**53; `budget` [n, 1]
    int64, at least 1. Equal keys are kept or dropped together. For rows that break these rules the result is
    undefined, but nothing is raised.
    """
    best = keys.sort(dim=-1, descending=True)
    return threshold_of_sorted(best.values, weights.gather(1, best.indices), budget)


def threshold_of_sorted(keys: Tensor, weights: Tensor, budget: Tensor) -> Tensor:
    num_kept = (weights.cumsum(-1) - weights < budget).sum(-1, keepdim=True)
    return keys.gather(1, (num_kept - 1).clamp_(min=0))


def threshold_by_buckets(keys: Tensor, weights: Tensor, budget: Tensor) -> Tensor:
    """The same threshold on CPU: weigh buckets of keys, then sort each row's bucket in which the budget is reached.

    The weights of a row sum to less than 2**53, so sums are exact in float64.
    """
    values, loads, limits = keys.numpy(), weights.numpy(), budget.numpy()
    num_rows = len(values)
    with np.errstate(invalid="ignore", over="ignore"):
        # A greater key has a lower bucket: each operation preserves the order, and equal keys share a bucket.
        depths = (values.max(-1, keepdims=True) - values) * np.float32(BUCKETS_PER_UNIT)
        buckets = np.fmin(depths, np.float32(NUM_BUCKETS - 1)).astype(np.int64)
    buckets += np.arange(num_rows)[:, None] * NUM_BUCKETS
    sums = np.bincount(buckets.ravel(), loads.ravel(), num_rows * NUM_BUCKETS)
    ends = sums.reshape(num_rows, NUM_BUCKETS).cumsum(-1)
    chosen = (ends < limits).sum(-1)
    is_reached = chosen < NUM_BUCKETS
    least = np.full(num_rows, -np.inf, dtype=np.float32)
    for row in np.flatnonzero(is_reached):
        here = np.flatnonzero(buckets[row] == chosen[row] + row * NUM_BUCKETS)
        if not len(here):
            continue
        order = here[np.argsort(-values[row, here])]
        before = ends[row, chosen[row] - 1] if chosen[row] else 0.0
        is_kept = before + loads[row, order].cumsum() - loads[row, order] < limits[row]
        least[row] = values[row, order[max(0, int(is_kept.sum()) - 1)]]
    return torch.from_numpy(least)[:, None]
