"""Lengths, arrival times and what is made of the moments at which tokens came."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from bench.parts.client import Answer, Request
from bench.parts.workloads import (
    exponential_lengths,
    gaps_within,
    milliseconds,
    poisson_seconds,
    saturated_rate,
    uniform_lengths,
)

REQUEST = Request(prompt=" ab", prompt_tokens=1, output_tokens=3)


def answer(due: float, *arrivals: float, ended: float = 0.0, num_tokens: int = 0) -> Answer:
    return Answer(
        REQUEST,
        due,
        list(arrivals),
        ended=ended or (arrivals[-1] if arrivals else due),
        num_tokens=num_tokens or len(arrivals),
    )


def test_poisson_arrivals_are_in_order_and_keep_their_rate() -> None:
    moments = poisson_seconds(20.0, 4000, seed="a")
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(200.0, rel=0.05)
    gaps = [b - a for a, b in pairwise(moments)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.1)


def test_the_same_seed_gives_the_same_workload_and_another_one_another() -> None:
    def drawn(seed: str) -> tuple[list[float], list[int]]:
        return (
            poisson_seconds(1.0, 20, seed=seed),
            uniform_lengths(20, least=1, most=100, seed=seed),
        )

    assert drawn("a") == drawn("a")
    assert all(one != other for one, other in zip(drawn("a"), drawn("b"), strict=True))


def test_exponential_lengths_have_their_mean_and_deviation_and_caps_cut_the_same_draws() -> None:
    lengths = exponential_lengths(20_000, mean=128, most=10_000, seed="a")
    assert statistics.fmean(lengths) == pytest.approx(128, rel=0.03)
    assert statistics.stdev(lengths) == pytest.approx(128, rel=0.03)
    assert min(lengths) == 1
    capped = exponential_lengths(20_000, mean=128, most=100, seed="a")
    assert capped == [min(100, length) for length in lengths]


def test_uniform_lengths_reach_both_ends() -> None:
    lengths = uniform_lengths(500, least=3, most=7, seed="a")
    assert set(lengths) == {3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("begin", "end", "gaps"),
    [
        (0.0, 9.0, [1.0, 2.0, 4.0]),
        # A pause that began before the window, or outlasts it, is felt in it.
        (2.5, 2.6, [2.0]),
        (1.5, 4.5, [1.0, 2.0, 4.0]),
        # Windows that only touch a gap do not hold it.
        (2.0, 4.0, [2.0]),
        (8.0, 9.0, []),
        (0.0, 1.0, []),
    ],
)
def test_gaps_count_where_any_of_them_lies_in_the_window(
    begin: float, end: float, gaps: list[float]
) -> None:
    assert list(gaps_within([1.0, 2.0, 4.0, 8.0], begin, end)) == gaps


def test_a_stream_of_one_token_has_no_gap() -> None:
    assert list(gaps_within([1.0], 0.0, 2.0)) == []


def test_milliseconds_are_interpolated_between_ranks() -> None:
    assert milliseconds([0.3, 0.1, 0.2], 0.5, 0.75, 1.0) == pytest.approx((200.0, 250.0, 300.0))


def test_the_saturated_rate_ignores_how_a_burst_begins_and_ends() -> None:
    # Nothing for ten seconds, then one every half second, then stragglers.
    ends = [10.0, *(10.0 + 0.5 * n for n in range(1, 15)), 40.0, 80.0, 160.0]
    assert saturated_rate([answer(0.0, ended=end) for end in ends]) == pytest.approx(2.0)
