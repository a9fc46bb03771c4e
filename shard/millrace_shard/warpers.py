"""Temperature, top-k, top-p and typical-p over rows of scores [n, V] float32: dropped tokens become minus infinity.

Each is a threshold on values that keeps all its ties, so no result depends on how a library orders equal ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.fixed_point import entropy, fixed_point

NUM_CANDIDATES = (256, 4096)
NEGATIVE_INFINITY = float("-inf")


def apply_temperature(scores: Tensor, temperature: Tensor) -> Tensor:
    """Divide by `temperature` [n, 1]; the best score becomes 0 first, so that nothing overflows upwards."""
    return (scores - scores.amax(-1, keepdim=True)).div_(temperature)


def keep_top_k(scores: Tensor, k: Tensor, largest_k: int) -> Tensor:
    """Drop what is below the k-th score; `k` [n, 1] int64 of at most `largest_k`, clamped to the vocabulary."""
    size = scores.shape[1]
    best = scores.topk(min(largest_k, size), dim=-1).values
    kth = best.gather(1, k.clamp(max=size) - 1)
    return scores.masked_fill(scores < kth, NEGATIVE_INFINITY)


def keep_top_p(scores: Tensor, mass: Tensor) -> Tensor:
    """Keep the likeliest tokens until `mass` [n, 1] of probability is reached, at least one."""
    weights = fixed_point(scores.softmax(-1))
    return scores.masked_fill(scores < _cut(scores, weights, mass), NEGATIVE_INFINITY)


def keep_typical(scores: Tensor, mass: Tensor) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy until `mass` [n, 1] is reached, at least one."""
    log_probabilities = scores.log_softmax(-1)
    probabilities = scores.softmax(-1)
    keys = -(log_probabilities + entropy(probabilities, log_probabilities)).abs()
    cut = _cut(keys, fixed_point(probabilities), mass)
    return scores.masked_fill(keys < cut, NEGATIVE_INFINITY)


def _cut(keys: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """The smallest key to keep, [n, 1]: those above it weigh less than `mass` of their row.

    Sums of integers being exact, candidates and full sort agree; few rows of few tokens get past the candidates.
    A device whose host must not wait for it takes the full sort at once.
    """
    total = weights.sum(-1, keepdim=True)
    budget = (mass.double() * total.double()).ceil().to(torch.int64)
    size = keys.shape[1]
    if keys.device.type != "cpu":
        return _cut_among(keys, weights, budget, size)[0]
    cut = keys.new_empty(keys.shape[0], 1)
    rows = torch.arange(keys.shape[0])
    for width in (*(width for width in NUM_CANDIDATES if width < size), size):
        cut[rows], num_kept = _cut_among(keys[rows], weights[rows], budget[rows], width)
        if width == size:
            break
        rows = rows[(num_kept == width).squeeze(1)]
        if not len(rows):
            break
    return cut


def _cut_among(keys: Tensor, weights: Tensor, budget: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The cut and the number kept, both [n, 1], looking at the `width` largest keys only."""
    best = keys.topk(width, dim=-1) if width < keys.shape[1] else keys.sort(descending=True)
    mine = weights.gather(1, best.indices)
    num_kept = (mine.cumsum(-1) - mine < budget).sum(-1, keepdim=True)
    return best.values.gather(1, (num_kept - 1).clamp_(min=0)), num_kept
