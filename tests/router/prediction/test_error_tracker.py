"""Quantiles of errors against sorting the whole window."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.prediction.error_tracker import ErrorTracker

SECONDS = st.floats(0, 1e6)


@settings(deadline=None, max_examples=300)
@given(
    pairs=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=60), window=st.integers(1, 20)
)
def test_quantiles_are_those_of_the_last_errors(
    pairs: list[tuple[float, float]], window: int
) -> None:
    audit = ErrorTracker(window)
    for number, (predicted, realised) in enumerate(pairs, start=1):
        audit.add(predicted, realised)
        errors = sorted(abs(a - b) for a, b in pairs[max(0, number - window) : number])
        assert len(audit) == len(errors)
        for share, quantile in ((0.5, audit.median()), (0.9, audit.p90())):
            within = sum(error <= quantile for error in errors)
            below = sum(error < quantile for error in errors)
            assert quantile in errors
            assert below < share * len(errors) <= within


def test_knows_nothing_before_the_first() -> None:
    audit = ErrorTracker()
    assert math.isnan(audit.median())
    assert math.isnan(audit.p90())


def test_an_error_that_is_no_number_is_refused() -> None:
    audit = ErrorTracker()
    with pytest.raises(ValueError, match="no error between nan"):
        audit.add(math.nan, 1.0)
    assert len(audit) == 0


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window=0"):
        ErrorTracker(0)
