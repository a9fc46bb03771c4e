"""Forecast lengths against samples whose distribution is known."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.prediction.traffic import AnswerLengths

LENGTHS = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=80)


def learned(pairs: list[tuple[int, int]]) -> AnswerLengths:
    lengths = AnswerLengths()
    for natural, limit in pairs:
        lengths.add(min(natural, limit), limit)
    return lengths


def exponential(seed: int, count: int, average: float) -> list[int]:
    rng = random.Random(seed)
    return [1 + int(rng.expovariate(1 / average)) for _ in range(count)]


def test_before_any_answer_the_limit_is_expected() -> None:
    lengths = AnswerLengths()
    assert lengths.expected(100) == 100
    assert lengths.quantile_left(10, 100, 0.1) == 90
    assert list(lengths.recent) == []


def test_answers_that_always_meet_their_limit_are_expected_to() -> None:
    lengths = learned([(9999, limit) for limit in range(10, 300)])
    assert lengths.expected(4000) == pytest.approx(4000)
    assert lengths.quantile_left(5, 4000, 0.95) == 3995


def test_limits_of_some_do_not_shorten_the_answers_of_others() -> None:
    naturals = exponential(1, 2000, 200)
    lengths = learned([(n, 50 if i % 2 else 4000) for i, n in enumerate(naturals)])
    assert lengths.expected(4000) == pytest.approx(200, rel=0.25)
    assert lengths.expected(50) == pytest.approx(mean(min(n, 50) for n in naturals), rel=0.1)


def test_expected_length_is_the_mean_up_to_the_limit() -> None:
    rng = random.Random(3)
    naturals = [1 + int(rng.lognormvariate(4.5, 0.7)) for _ in range(4000)]
    lengths = learned([(n, 4000) for n in naturals])
    for limit in (50, 100, 400, 4000):
        expected = mean(min(n, limit) for n in naturals)
        assert lengths.expected(limit) == pytest.approx(expected, rel=0.1)


def test_quantiles_are_exceeded_as_often_as_they_say() -> None:
    naturals = exponential(4, 3000, 100)
    lengths = learned([(n, 4000) for n in naturals])
    for share in (0.1, 0.5, 0.9):
        quantile = lengths.quantile_left(50, 4000, 1.0 - share)
        exceeding = [n > 50 + quantile for n in naturals if n > 50]
        assert mean(exceeding) == pytest.approx(share, abs=0.06)


def test_traffic_that_changes_is_followed() -> None:
    lengths = learned([(n, 4000) for n in exponential(5, 1500, 300)])
    for natural in exponential(6, 1500, 30):
        lengths.add(natural, 4000)
    assert lengths.expected(4000) == pytest.approx(30, rel=0.25)


@settings(deadline=None, max_examples=200)
@given(
    pairs=LENGTHS, so_far=st.integers(0, 6000), left=st.integers(0, 6000), share=st.floats(0, 0.999)
)
def test_what_is_left_stays_within_the_limit(
    pairs: list[tuple[int, int]], so_far: int, left: int, share: float
) -> None:
    lengths = learned(pairs)
    limit = so_far + left
    assert 0 <= lengths.quantile_left(so_far, limit, share) <= left
    assert 0 <= lengths.expected(limit) <= limit + 1e-6
    assert lengths.expected(limit) <= lengths.expected(limit + 9) + 1e-6


def test_an_answer_without_tokens_says_nothing() -> None:
    lengths = learned([])
    lengths.add(0, 10)
    assert lengths.expected(10) == 10
