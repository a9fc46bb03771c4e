"""Temperature, top-n-sigma, top-k, top-p, typical-p, min-p and XTC over rows of scores [n, V] float32.

Dropped tokens get minus infinity. Each filter is a threshold that keeps all ties, so no result depends on how a library
orders equal values.

Rows that keep few tokens are sampled from their best candidates, with the same tokens as from the whole vocabulary. A
row is complete if the least score that it keeps is above the last candidate's, so that no token past the candidates
is kept, ties included. Incomplete rows are sampled from the whole vocabulary. All rows have the same number of
candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.device import transfers
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.scores import Best, FindThreshold, aligned, choose_greedy
from millrace_shard.sampling.sampling_rows import parameter
from millrace_shard.sampling.thresholds import (
    budget_of,
    draw,
    draw_from,
    entropy,
    find_threshold,
    fixed_point,
    threshold_by_sorting,
    threshold_of_sorted,
)
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


def shares(find: FindThreshold) -> tuple[tuple[str, Callable[[Tensor, Tensor], Tensor]], ...]:
    """The filters by a share of the probability, by their parameters' names, in the order in which they apply."""
    return (
        ("top_p", partial(keep_top_p, find=find)),
        ("typical_p", partial(keep_typical, find=find)),
        ("min_p", keep_min_p),
    )


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
    result = torch.empty_like(scores)
    for row, limit in enumerate(limits.squeeze(1).tolist()):
        torch.threshold(scores[row], limit, NEGATIVE_INFINITY, out=result[row])
    return result


def surprise(probabilities: Tensor, log_probabilities: Tensor) -> Tensor:
    """Keys of typical sampling: a greater key means that a token's surprise is nearer to the entropy."""
    return -(log_probabilities + entropy(probabilities, log_probabilities)).abs()


NUM_CANDIDATES = 256
BLOCKS = (32, 8)
"""Scores per block, in each of the passes that narrow the search by the maxima of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """The W most likely tokens of n rows, the most likely first."""

    scores: Tensor
    """[n, W] float32."""
    ids: Tensor
    """[n, W] int64; the order of equal scores is undefined."""
    best_probability: Tensor | None
    """[n, 1] float32, probability of the best token in the whole vocabulary at the row's temperature; None if the
    candidates are the whole vocabulary, or if it was not requested."""
    are_all: bool
    """Whether the candidates are the whole vocabulary."""

    def select(self, rows: Tensor) -> Candidates:
        return replace(
            self,
            scores=self.scores[rows],
            ids=self.ids[rows],
            best_probability=None if self.best_probability is None else self.best_probability[rows],
        )


def find_candidates(scores: Tensor, temperature: Tensor | None) -> Candidates:
    """The best of `scores` [n, V] float32; with `temperature` [n, 1], also the probability of the best token."""
    width = min(NUM_CANDIDATES, scores.shape[1])
    values, ids = _best(scores, width, BLOCKS)
    are_all = width == scores.shape[1]
    best_probability = None
    if temperature is not None and not are_all:
        scaled = (scores - values[:, :1]).div_(temperature)
        best_probability = scaled.softmax(-1).gather(1, ids[:, :1])
    return Candidates(scores=values, ids=ids, best_probability=best_probability, are_all=are_all)


def _best(scores: Tensor, width: int, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The `width` greatest scores of each row, descending, and their indexes.

    The `width` blocks with the greatest maxima hold them: each of these blocks has a score that is at least as great
    as any score in the other blocks.
    """
    size = scores.shape[1]
    if not blocks or size < 2 * blocks[0] * width:
        best = scores.topk(width, dim=-1)
        return best.values, best.indices
    height = blocks[0]
    num_blocks = size // height
    body = height * num_blocks
    # A block is a column, since maxima over columns are vectorised.
    columns = scores[:, :body].view(len(scores), height, num_blocks)
    chosen = columns.amax(1).topk(width, dim=-1, sorted=False).indices
    inside = columns.gather(2, chosen[:, None, :].expand(-1, height, -1)).flatten(1)
    # The scores at the end that fill no block are all searched.
    pool = torch.cat([inside, scores[:, body:]], 1)
    values, index = _best(pool, width, blocks[1:])
    in_blocks = chosen.gather(1, index % width) + index // width * num_blocks
    left_over = index + (body - height * width)
    return values, torch.where(index < height * width, in_blocks, left_over)


def join_candidates(parts: list[Candidates]) -> Candidates:
    """The rows of all `parts`, which have the same fields set, in order."""
    columns = [p.best_probability for p in parts if p.best_probability is not None]
    return Candidates(
        scores=torch.cat([part.scores for part in parts]),
        ids=torch.cat([part.ids for part in parts]),
        best_probability=torch.cat(columns) if columns else None,
        are_all=parts[0].are_all,
    )


class CandidateWarpers:
    """Temperature, top-k, top-p, typical-p and min-p of n rows, applied to their candidates."""

    def __init__(self, parameters: NDArray[np.void], device: torch.device) -> None:
        """`parameters` [n] of sequence.PARAMETERS."""

        def column(name: str) -> Tensor:
            values: NDArray[Any] = parameters[name]
            return upload(values, device)[:, None]

        self.temperature = column("temperature")
        self._top_k = column("top_k")
        self._top_p = column("top_p")
        self._typical_p = column("typical_p")
        self._min_p = column("min_p")
        # A filter that no row uses is skipped.
        self._any_top_p = bool((parameters["top_p"] < 1).any())
        self._any_typical = bool((parameters["typical_p"] < 1).any())
        self._any_min_p = bool((parameters["min_p"] > 0).any())

    def apply(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Scores of the candidates [n, W], minus infinity for dropped ones, and which rows are complete, [n] bool.

        Without `best_probability`, every row must have a top-k, or the candidates must be the whole vocabulary.
        """
        raw = candidates.scores
        scores = (raw - raw[:, :1]) / self.temperature
        last = scores[:, -1:]
        kth = scores.gather(1, (self._top_k - 1).clamp(0, scores.shape[1] - 1))
        scores = _drop(scores, (self._top_k > 0) & (scores < kth))
        is_known = torch.ones_like(self._top_k, dtype=torch.bool)
        if self._any_top_p:
            # Tokens that tie at the k-th place may lie past the candidates, and top-p counts their probability.
            has_both = (self._top_k > 0) & (self._top_p < 1)
            is_known = ~has_both | _is_complete(scores, last)
            scores = self._keep_top_p(scores, candidates.best_probability)
        if self._any_typical:
            # Typical sampling depends on every token that the filters before it keep.
            is_known &= (self._typical_p >= 1) | _is_complete(scores, last)
            scores = self._keep_typical(scores)
        if self._any_min_p:
            scores = keep_min_p(scores, self._min_p)
        is_complete = is_known & _is_complete(scores, last)
        return scores, is_complete.squeeze(1) | candidates.are_all

    def _keep_top_p(self, scores: Tensor, best_probability: Tensor | None) -> Tensor:
        probabilities = scores.softmax(-1)
        mass = self._top_p.double()
        if best_probability is not None:
            # The softmax over candidates is relative to them, so the mass is divided by their share of all probability.
            mass = mass * probabilities[:, :1].double() / best_probability.double()
        weights = fixed_point(probabilities)
        least = threshold_of_sorted(scores, weights, budget_of(weights, mass))
        return _drop(scores, (self._top_p < 1) & (scores < least))

    def _keep_typical(self, scores: Tensor) -> Tensor:
        probabilities = scores.softmax(-1)
        keys = surprise(probabilities, scores.log_softmax(-1))
        weights = fixed_point(probabilities)
        least = threshold_by_sorting(keys, weights, budget_of(weights, self._typical_p))
        return _drop(scores, (self._typical_p < 1) & (keys < least))


def draw_candidate(candidates: Candidates, scores: Tensor, uniforms: Tensor) -> Tensor:
    """Index [n] int64 of one candidate per row, drawn by probability; ids are taken in the vocabulary's order.

    `scores` [n, W] come from `CandidateWarpers.apply`; `uniforms` [n] int64 have UNIFORM_BITS bits.
    """
    order = candidates.ids.argsort(-1)
    weights = fixed_point(scores.softmax(-1)).gather(1, order)
    return order.gather(1, draw(weights, uniforms)[:, None]).squeeze(1)


def _drop(scores: Tensor, dropped: Tensor) -> Tensor:
    return scores.masked_fill(dropped, NEGATIVE_INFINITY)


def _is_complete(scores: Tensor, last: Tensor) -> Tensor:
    """Whether the least kept score of [n, W] is above the `last` candidate's [n, 1]: [n, 1] bool."""
    least = scores.masked_fill(scores == NEGATIVE_INFINITY, torch.inf).amin(-1, keepdim=True)
    return (least > last) | (last == NEGATIVE_INFINITY)


def choose_plain(logits: Tensor, words: Tensor, uniforms: Tensor) -> Best:
    """The tokens of `logits` [n, V] float32, with the bits of Sampler.sample.

    `words` [words, n] int32 are the parameters of the rows, see SlotParameters; `uniforms` [n] int64.
    """
    best = choose_greedy(logits)
    scores = apply_temperature(aligned(logits), parameter(words, "temperature")[:, None])
    drawn = draw_from(scores, logits.shape[1], uniforms)
    logprobs = scores.log_softmax(-1).gather(1, drawn[:, None]).squeeze(1)
    is_drawn = parameter(words, "do_sample") > 0
    return Best(
        torch.where(is_drawn, drawn, best.ids),
        torch.where(is_drawn, logprobs, best.logprobs),
        torch.where(is_drawn, ~logprobs.isfinite(), best.failed),
    )
