"""Temperature, top-n-sigma, top-k, top-p, typical-p, min-p and XTC over rows of scores [n, V] float32.

Dropped tokens get minus infinity. Each filter is a threshold that keeps all ties, so no result depends on how a library
orders equal values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.device import transfers
from millrace_shard.kernels.sampling_kernels import FindThreshold
from millrace_shard.sampling.fixed_point import entropy
from millrace_shard.sampling.thresholds import find_threshold
from millrace_shard.sampling.watermark import HASH_BITS, top_bits

NEGATIVE_INFINITY = float("-inf")
SIGMA_UNIT = 4096
"""Scores are counted in units of 1 / 4096 for their standard deviation."""
SIGMA_RANGE = 1024.0
"""Scores further below the best count as this far: the squares of 2 ** 18 of them still add up to an int64."""
MOST_BY_SORTING = 1024
"""The largest k for which plain torch uses `topk`."""


def apply_temperature(scores: Tensor, temperature: Tensor) -> Tensor:
    """Divide by `temperature` [n, 1], after a shift of the best score to 0, so that no score overflows to infinity."""
    return (scores - scores.amax(-1, keepdim=True)).div_(temperature)


def keep_top_k(
    scores: Tensor, k: Tensor, largest_k: int, find: FindThreshold | None = None
) -> Tensor:
    """Drop tokens below the k-th score; `k` [n, 1] int64 from 1 to `largest_k`, clamped to the vocabulary."""
    size = scores.shape[1]
    if find is not None:
        kth = find(scores, None, k)
    elif largest_k <= MOST_BY_SORTING:
        best = scores.topk(min(largest_k, size), dim=-1).values
        kth = best.gather(1, k.clamp(max=size) - 1)
    else:
        kth = find_threshold(scores, None, k)
    return drop_below(scores, kth)


def keep_top_p(scores: Tensor, mass: Tensor, find: FindThreshold = find_threshold) -> Tensor:
    """Keep the most likely tokens until the probability `mass` [n, 1] is reached, at least one token."""
    return drop_below(scores, find(scores, scores.softmax(-1), mass))


def keep_typical(scores: Tensor, mass: Tensor, find: FindThreshold = find_threshold) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy until `mass` [n, 1] is reached, at least one token.

    Meister et al. 2022 (arXiv 2202.00666).
    """
    log_probabilities = scores.log_softmax(-1)
    probabilities = scores.softmax(-1)
    keys = surprise(probabilities, log_probabilities)
    return scores.masked_fill(keys < find(keys, probabilities, mass), NEGATIVE_INFINITY)


def keep_min_p(scores: Tensor, share: Tensor) -> Tensor:
    """Drop tokens less likely than `share` [n, 1] times the best token's probability.

    Nguyen et al. 2024 (arXiv 2407.01082).
    """
    probabilities = scores.softmax(-1)
    least = share * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(probabilities < least, NEGATIVE_INFINITY)


def keep_top_n_sigma(scores: Tensor, n: Tensor) -> Tensor:
    """Drop tokens more than `n` [n, 1] standard deviations of the possible scores below the best; ignores temperature.

    Tang et al. 2024 (arXiv 2411.07641). Scores are summed as integers, which is exact in any order.
    """
    shifted = scores - scores.amax(-1, keepdim=True)
    is_possible = shifted > NEGATIVE_INFINITY
    below = (shifted.clamp(min=-SIGMA_RANGE) * -SIGMA_UNIT).round().long()
    below = below.masked_fill(~is_possible, 0)
    count = is_possible.sum(-1, keepdim=True).double()
    mean = below.sum(-1, keepdim=True).double() / count
    variance = (below * below).sum(-1, keepdim=True).double() / count - mean * mean
    sigma = variance.clamp(min=0).sqrt() / SIGMA_UNIT
    return scores.masked_fill(shifted < (-n.double() * sigma).float(), NEGATIVE_INFINITY)


def exclude_top_choices(
    scores: Tensor, probability: Tensor, threshold: Tensor, uniforms: Tensor
) -> Tensor:
    """XTC: with `probability` [n, 1], drop the tokens of at least `threshold` [n, 1], except the least likely of them.

    Tokens that tie with the least likely one stay. `uniforms` [n] int64 of UNIFORM_BITS bits, which also draw the
    token: a hash of them decides, so that the rest of the draw is as good as independent.
    """
    hashed = top_bits(uniforms)[:, None]
    is_on = hashed < (probability.double() * 2.0**HASH_BITS)
    probabilities = scores.softmax(-1)
    is_choice = (probabilities >= threshold) & (scores > NEGATIVE_INFINITY)
    least = probabilities.masked_fill(~is_choice, torch.inf).amin(-1, keepdim=True)
    return scores.masked_fill(is_on & (probabilities > least), NEGATIVE_INFINITY)


def drop_below(scores: Tensor, least: Tensor) -> Tensor:
    """Set scores [n, V] below `least` [n, 1] to minus infinity; returns new scores."""
    if not transfers.is_synchronous(scores.device):
        return scores.masked_fill(scores < least, NEGATIVE_INFINITY)
    # A comparison of each row with a number takes an eighth of the time of a mask.
    limits = torch.nextafter(least, torch.full_like(least, NEGATIVE_INFINITY))
    kept = torch.empty_like(scores)
    for row, limit in enumerate(limits.squeeze(1).tolist()):
        torch.threshold(scores[row], limit, NEGATIVE_INFINITY, out=kept[row])
    return kept


def surprise(probabilities: Tensor, log_probabilities: Tensor) -> Tensor:
    """Keys of typical sampling: a greater key means that a token's surprise is nearer to the entropy."""
    return -(log_probabilities + entropy(probabilities, log_probabilities)).abs()
