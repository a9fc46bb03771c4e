"""The implementations of thresholds against a plain reading of the rule, and against each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_shard.sampling.thresholds import threshold_by_buckets, threshold_by_sorting

WAYS = {"buckets": threshold_by_buckets, "sorting": threshold_by_sorting}
numbers = st.floats(width=32, allow_nan=False) | st.integers(-3, 3).map(float)
items = st.lists(st.tuples(numbers, st.integers(0, 1 << 38)), min_size=1, max_size=40)


def kept(pairs: list[tuple[float, int]], budget: int) -> list[bool]:
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
def test_those_above_the_cut_weigh_less_than_the_budget(
    way: str, pairs: list[tuple[float, int]], share: float
) -> None:
    budget = max(1, int(share * sum(weight for _, weight in pairs)))
    keys = torch.tensor([[key for key, _ in pairs]])
    weights = torch.tensor([[weight for _, weight in pairs]])
    found = WAYS[way](keys, weights, torch.tensor([[budget]]))
    assert found.shape == (1, 1)
    assert (keys >= found)[0].tolist() == kept(pairs, budget)


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
