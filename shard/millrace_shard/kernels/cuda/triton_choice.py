"""Triton kernels of the router's choice, and of the order of pairs by expert.

T tokens, E experts, K chosen experts of a token; pair `t * K + rank` is a token and one of its experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID = range(3)
_SOFTMAX = tl.constexpr(SOFTMAX)
_SOFTMAX_OF_CHOSEN = tl.constexpr(SOFTMAX_OF_CHOSEN)
_SIGMOID = tl.constexpr(SIGMOID)
_TINY = tl.constexpr(1e-20)
_PAIRS_PER_LOOK = tl.constexpr(1024)


@triton.jit
def _best(values, lane, count: tl.constexpr):
    """The first index of the maximum; the last one if there is none, as with NaN."""
    top = tl.max(values, 0)
    return tl.minimum(tl.min(tl.where(values == top, lane, count), 0), count - 1)


@triton.jit
def _within_best_groups(
    ranked,
    lane,
    experts: tl.constexpr,
    groups: tl.constexpr,
    kept: tl.constexpr,
    members: tl.constexpr,
):
    """`ranked` with minus infinity outside the best groups; a group counts by the sum of its one or two best."""
    group = lane // (experts // groups)
    worth = tl.full(ranked.shape, float("-inf"), tl.float32)
    for each in range(groups):
        own = tl.where(group == each, ranked, float("-inf"))
        total = tl.max(own, 0)
        if members == 2:
            first = _best(own, lane, experts)
            total += tl.max(tl.where(lane == first, float("-inf"), own), 0)
        worth = tl.where((group == each) & (lane < experts), total, worth)
    found = tl.full(ranked.shape, float("-inf"), tl.float32)
    for _ in range(kept):
        best = _best(worth, lane, experts) // (experts // groups)
        found = tl.where(group == best, ranked, found)
        worth = tl.where(group == best, float("-inf"), worth)
    return found


@triton.jit
def choose(
    chosen,
    shares,
    logits,
    bias,
    correction,
    scale,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    scoring: tl.constexpr,
    renormalise: tl.constexpr,
    groups: tl.constexpr,
    top_groups: tl.constexpr,
    members: tl.constexpr,
    has_bias: tl.constexpr,
    has_correction: tl.constexpr,
):
    """The experts of a token, best first, [T, K] int32, and their shares, [T, K] float32; grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, triton.next_power_of_2(experts))
    known = lane < experts
    scores = tl.load(logits + row * experts + lane, mask=known, other=float("-inf"))
    if has_bias:
        scores += tl.load(bias + lane, mask=known, other=0.0)
    ranked = scores
    if scoring == _SIGMOID:
        scores = tl.sigmoid(scores)
        ranked = tl.where(known, scores, float("-inf"))
        if has_correction:
            ranked += tl.load(correction + lane, mask=known, other=0.0)
    if groups > 1:
        ranked = _within_best_groups(ranked, lane, experts, groups, top_groups, members)
    ranks = tl.arange(0, triton.next_power_of_2(top_k))
    found = tl.zeros(ranks.shape, tl.int32)
    share = tl.full(ranks.shape, float("-inf"), tl.float32)
    for rank in range(top_k):
        best = _best(ranked, lane, experts)
        found = tl.where(ranks == rank, best, found)
        share = tl.where(ranks == rank, tl.sum(tl.where(lane == best, scores, 0.0), 0), share)
        ranked = tl.where(lane == best, float("-inf"), ranked)
    share = _shares(scores, share, ranks < top_k, scoring, renormalise) * scale
    where = row * top_k + ranks
    tl.store(chosen + where, found, mask=ranks < top_k)
    tl.store(shares + where, share, mask=ranks < top_k)


@triton.jit
def _shares(scores, share, live, scoring: tl.constexpr, renormalise: tl.constexpr):
    """The shares of the chosen scores `share`, which are minus infinity, and become 0, where not `live`."""
    if scoring == _SOFTMAX:
        top = tl.max(scores, 0)
        share = tl.exp(share - top) / tl.sum(tl.exp(scores - top), 0)
    elif scoring == _SOFTMAX_OF_CHOSEN:
        raised = tl.exp(share - tl.max(share, 0))
        share = raised / tl.sum(raised, 0)
    share = tl.where(live, share, 0.0)
    if renormalise:
        share = share / (tl.sum(share, 0) + _TINY)
    return share


@triton.jit(do_not_specialize=["num_pairs"])
def group_pairs(order, starts, chosen, num_pairs):
    """The pairs by expert, and within an expert in order, [T * K] int32, and where each begins; grid (E,).

    `starts` [E + 1] int32 ends with the number of pairs.
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, _PAIRS_PER_LOOK)
    start = 0
    for base in range(0, num_pairs, _PAIRS_PER_LOOK):
        of = tl.load(chosen + base + lane, mask=base + lane < num_pairs, other=tl.num_programs(0))
        start += tl.sum((of < expert).to(tl.int32), 0)
    tl.store(starts + expert, start)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, num_pairs)
    for base in range(0, num_pairs, _PAIRS_PER_LOOK):
        of = tl.load(chosen + base + lane, mask=base + lane < num_pairs, other=-1)
        own = (of == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(own, 0) - 1, base + lane, mask=of == expert)
        start += tl.sum(own, 0)
