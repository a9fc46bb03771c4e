from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.simulate.metrics import Distribution

VALUES = st.lists(st.floats(min_value=0.0, max_value=1e6), min_size=1, max_size=60)


def filled(values: list[float]) -> Distribution:
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    return distribution


@given(VALUES, st.floats(min_value=0.1, max_value=100.0))
def test_percentiles_are_those_of_the_nearest_rank_within_one_percent(
    values: list[float], percent: float
) -> None:
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    assert filled(values).percentile(percent) == pytest.approx(exact, rel=0.0101, abs=0.0)


@given(VALUES)
def test_count_and_mean_are_exact(values: list[float]) -> None:
    distribution = filled(values)
    assert distribution.count == len(values)
    assert distribution.mean == pytest.approx(math.fsum(values) / len(values))


def test_equal_values_come_back_as_they_are() -> None:
    distribution = Distribution()
    distribution.add(0.123, times=7)
    assert distribution.percentile(50) == pytest.approx(0.123, rel=1e-15)
    assert distribution.count == 7


def test_nothing_is_zero() -> None:
    assert (Distribution().percentile(99), Distribution().mean) == (0.0, 0.0)
