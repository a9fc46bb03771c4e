"""Warpers against transformers' warpers, and the properties that random scores must keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from millrace_shard.device import transfers
from millrace_shard.sampling.thresholds import (
    SCALE_BITS,
    UNIFORM_BITS,
    draw,
    entropy,
    fixed_point,
    threshold_by_buckets,
    threshold_by_sorting,
)
from millrace_shard.sampling.warpers import (
    apply_temperature,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
)

VOCAB = 5000


def random_scores(rows: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def kept(scores: Tensor) -> Tensor:
    return ~scores.isinf()


def differ(ours: Tensor, theirs: Tensor) -> int:
    """Tokens kept by one of two only, which rounding of a float32 sum over the vocabulary may move by one."""
    return int((kept(ours) != kept(theirs)).sum())


@pytest.mark.parametrize("spread", [0.1, 3.0, 9.0])
@pytest.mark.parametrize("mass", [0.02, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_tokens_that_transformers_keeps(mass: float, spread: float) -> None:
    scores = random_scores(4, 1, spread)
    theirs = TopPLogitsWarper(mass)(None, scores.double())
    ours = keep_top_p(scores, column([mass] * 4))
    assert differ(ours, theirs) <= 4
    assert torch.equal(ours[kept(ours)], scores[kept(ours)])


@pytest.mark.parametrize("spread", [0.1, 3.0, 9.0])
@pytest.mark.parametrize("mass", [0.02, 0.5, 0.9, 0.999])
def test_typical_keeps_the_tokens_that_transformers_keeps(mass: float, spread: float) -> None:
    scores = random_scores(4, 2, spread)
    theirs = TypicalLogitsWarper(mass)(None, scores.double())
    ours = keep_typical(scores, column([mass] * 4))
    assert differ(ours, theirs) <= 4
    assert torch.equal(ours[kept(ours)], scores[kept(ours)])


@pytest.mark.parametrize("k", [1, 7, 300, 4999, 5000, 9000])
def test_top_k_keeps_the_tokens_that_transformers_keeps(k: int) -> None:
    scores = random_scores(3, 3).bfloat16().float()
    theirs = TopKLogitsWarper(k)(None, scores)
    ks = torch.tensor([[k], [1], [k]])
    ours = keep_top_k(scores, ks, k)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[2], theirs[2])
    assert kept(ours)[1].sum() == (scores[1] == scores[1].max()).sum()


def test_temperature_is_a_division_up_to_a_constant() -> None:
    scores = random_scores(2, 4)
    theirs = TemperatureLogitsWarper(0.7)(None, scores).log_softmax(-1)
    ours = apply_temperature(scores, column([0.7, 1e-38])).log_softmax(-1)
    torch.testing.assert_close(ours[0], theirs[0])
    assert ours[1].argmax() == scores[1].argmax()
    assert not ours.isnan().any()


tied_scores = st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=40)
masses = st.integers(1, 99).map(lambda percent: percent / 100)


@settings(deadline=None, derandomize=True)
@given(tied_scores, masses)
def test_top_p_is_the_smallest_set_of_whole_ties(values: list[float], mass: float) -> None:
    scores = torch.tensor([values])
    probs = scores.double().softmax(-1)[0]
    chosen = kept(keep_top_p(scores, column([mass])))[0]
    assert chosen.any()
    least = scores[0][chosen].min()
    assert torch.equal(chosen, scores[0] >= least)
    assert probs[chosen].sum() >= mass - 1e-6
    above = probs[scores[0] > least]
    assert above.sum() < mass + 1e-6


@settings(deadline=None, derandomize=True)
@given(tied_scores, st.integers(1, 50))
def test_top_k_keeps_ties_of_the_kth(values: list[float], k: int) -> None:
    scores = torch.tensor([values])
    chosen = kept(keep_top_k(scores, torch.tensor([[k]]), k))[0].tolist()
    kth = sorted(values, reverse=True)[:k][-1]
    assert chosen == [value >= kth for value in values]


@pytest.mark.parametrize("mass", [0.05, 0.6, 0.97, 0.9999])
def test_every_way_to_find_a_cut_keeps_the_same(
    mass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = torch.cat([random_scores(2, 5, spread) for spread in (0.01, 1.0, 4.0, 12.0)])
    scores = scores.bfloat16().float()
    masses = column([mass] * len(scores))
    ks = torch.tensor([[int(mass * VOCAB)]] * len(scores))
    result = keep_top_p(scores, masses), keep_typical(scores, masses), keep_top_k(scores, ks, VOCAB)
    monkeypatch.setattr(transfers, "is_synchronous", lambda _: False)
    assert torch.equal(result[0], keep_top_p(scores, masses))
    assert torch.equal(result[1], keep_typical(scores, masses))
    assert torch.equal(result[2], keep_top_k(scores, ks, VOCAB))


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 1.0])
def test_min_p_keeps_the_tokens_that_transformers_keeps(share: float) -> None:
    scores = random_scores(4, 6)
    theirs = MinPLogitsWarper(share)(None, scores.double())
    ours = keep_min_p(scores, column([share] * 4))
    assert differ(ours, theirs) <= 4
    assert torch.equal(ours[kept(ours)], scores[kept(ours)])


def test_min_p_is_relative_to_the_likeliest_token_that_is_left() -> None:
    """After typical sampling the likeliest token may be gone."""
    scores = torch.tensor([[float("-inf"), 0.0, -1.0, -5.0]])
    assert kept(keep_min_p(scores, column([0.3])))[0].tolist() == [False, True, True, False]
    assert kept(keep_min_p(scores, column([0.0])))[0].tolist() == [False, True, True, True]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=1100), st.integers(0, 2**24 - 1))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_draw_walks_the_weights_in_order(weights: list[int], uniform: int) -> None:
    index = int(draw(torch.tensor([weights]), torch.tensor([uniform])))
    target = uniform * sum(weights) >> UNIFORM_BITS
    assert 0 <= index < len(weights)
    if sum(weights):
        assert weights[index] > 0
        assert sum(weights[:index]) <= target < sum(weights[: index + 1])


def test_a_draw_skips_tokens_without_weight_between_blocks() -> None:
    weights = torch.tensor([[1] * 512 + [0] * 600 + [1]])
    for target, index in ((0, 0), (511, 511), (512, 1112)):
        uniform = -(-(target << UNIFORM_BITS) // 513)
        assert draw(weights, torch.tensor([uniform])).tolist() == [index]


def test_sums_of_whole_distributions_fit_their_integers() -> None:
    one = torch.zeros(1, 3)
    one[0, 1] = 1.0
    weights = fixed_point(one)
    assert weights.tolist() == [[0, 1 << SCALE_BITS, 0]]
    for uniform in (0, 2**UNIFORM_BITS - 1):
        assert draw(weights, torch.tensor([uniform])).tolist() == [1]


def test_entropy_counts_impossible_tokens_as_nothing() -> None:
    scores = torch.tensor([[1.0, 1.0, float("-inf"), 1.0, 1.0], [0.0] + [float("-inf")] * 4])
    result = entropy(scores.softmax(-1), scores.log_softmax(-1))
    torch.testing.assert_close(result, torch.tensor([[4.0], [1.0]]).log())


WAYS = {"buckets": threshold_by_buckets, "sorting": threshold_by_sorting}
numbers = st.floats(width=32, allow_nan=False) | st.integers(-3, 3).map(float)
items = st.lists(st.tuples(numbers, st.integers(0, 1 << 38)), min_size=1, max_size=40)


def reference_kept(pairs: list[tuple[float, int]], budget: int) -> list[bool]:
    """By descending key, until the budget is reached, ties whole."""
    total, least = 0, float("inf")
    for key, weight in sorted(pairs, reverse=True):
        if total >= budget:
            break
        total, least = total + weight, key
    return [key >= least for key, _ in pairs]


@settings(deadline=None, max_examples=300, derandomize=True)
@given(items, st.floats(0, 1.2))
@pytest.mark.parametrize("way", WAYS)
def test_keys_above_the_cut_weigh_less_than_the_budget(
    way: str, pairs: list[tuple[float, int]], share: float
) -> None:
    budget = max(1, int(share * sum(weight for _, weight in pairs)))
    keys = torch.tensor([[key for key, _ in pairs]])
    weights = torch.tensor([[weight for _, weight in pairs]])
    result = WAYS[way](keys, weights, torch.tensor([[budget]]))
    assert result.shape == (1, 1)
    assert (keys >= result)[0].tolist() == reference_kept(pairs, budget)


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 30.0])
def test_buckets_and_sorting_find_the_same_cut_in_long_rows(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(6, 20_000, generator=generator) * spread - 1.0
    weights = torch.randint(0, 1 << 30, keys.shape, generator=generator)
    shares = torch.tensor([[0.0], [1e-4], [0.3], [0.9], [1.0], [1.1]], dtype=torch.float64)
    budget = (shares * weights.sum(-1, keepdim=True)).long().clamp_(min=1)
    by_buckets, by_sorting = (way(keys, weights, budget) for way in WAYS.values())
    assert torch.equal(keys < by_buckets, keys < by_sorting)


def test_rows_that_break_the_rules_do_not_raise() -> None:
    keys = torch.tensor([[float("nan"), 1.0], [float("inf"), float("-inf")], [1.0, 2.0]])
    weights = torch.tensor([[-(1 << 63), 5], [0, 0], [3, 4]])
    budget = torch.tensor([[-4], [1], [3]])
    for way in WAYS.values():
        assert way(keys, weights, budget)[2].tolist() == [2.0]
