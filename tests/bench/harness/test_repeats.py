"""Medians, marks and ratios of repeated measurements."""

from __future__ import annotations

import pytest
from bench.harness.repeats import Repeated, Sample, figure, ratio_text


def repeated(samples: list[tuple[float, float]]) -> Repeated:
    """From (value, cores of others) pairs."""
    return Repeated(tuple(Sample(*pair) for pair in samples))


def test_the_median_is_of_the_undisturbed_ones() -> None:
    found = repeated([(10.0, 0.0), (12.0, 0.05), (99.0, 0.4), (14.0, 0.1)])
    assert found.median == 12.0
    assert found.text == "12.0"
    assert found.all_text() == "10.0 12.0 ~99.0 14.0"


def test_where_all_were_disturbed_the_median_is_marked() -> None:
    found = repeated([(10.0, 0.5), (20.0, 0.2)])
    assert (found.median, found.is_clean, found.text) == (15.0, False, "~15.0")


def test_a_ratio_is_marked_where_either_side_was_disturbed() -> None:
    clean, disturbed = repeated([(30.0, 0.0)]), repeated([(20.0, 0.3)])
    assert ratio_text(clean, clean) == "1.00"
    assert ratio_text(clean, disturbed) == "~1.50"
    assert ratio_text(clean, None) == ""


def test_no_sample_is_no_figure() -> None:
    with pytest.raises(ValueError, match="no sample"):
        Repeated(())


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1234"), (99.95, "100.0"), (12.34, "12.3"), (0.123, "0.12")]
)
def test_a_figure_has_about_three_digits(value: float, text: str) -> None:
    assert figure(value) == text
