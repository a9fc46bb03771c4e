"""The figures of a level, against numbers worked out by hand and by the standard library."""

from __future__ import annotations

import random
import statistics

import pytest
from bench.comparison.report import level_table

from millrace.load.levels import closed
from millrace.load.measurement import (
    Measurement,
    Quantiles,
    Timeline,
    quantile,
    summarise,
)

LEVEL = closed(2, 4, 3, rounds=1)


def test_figures_of_two_known_requests() -> None:
    timelines = [Timeline(10.0, [10.5, 10.6, 10.8]), Timeline(10.2, [10.9, 11.2, 12.0])]
    result = summarise("millrace", LEVEL, timelines, failures=["late"])
    assert result.num_tokens == 6
    assert result.wall_seconds == pytest.approx(2.0)
    assert result.tokens_per_second == pytest.approx(3.0)
    assert result.first_token_ms.p50 == pytest.approx(600.0)
    assert result.between_tokens_ms.p50 == pytest.approx(250.0)
    assert result.failures == ("late",)


def test_quantiles_agree_with_the_standard_library() -> None:
    generator = random.Random(7)
    sample = sorted(generator.random() for _ in range(137))
    expected = statistics.quantiles(sample, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert quantile(sample, percent / 100) == pytest.approx(expected[percent - 1])


def test_quantiles_of_little() -> None:
    assert Quantiles.of([]) == Quantiles(0.0, 0.0, 0.0)
    assert Quantiles.of([0.25]) == Quantiles(250.0, 250.0, 250.0)


def test_no_good_request_is_an_error_that_names_the_reasons() -> None:
    with pytest.raises(ValueError, match="every request failed: status 500"):
        summarise("millrace", LEVEL, [], failures=["status 500", "status 500"])


def measurement(server: str, tokens_per_second: float, *, other_cores: float = 0.0) -> Measurement:
    return Measurement(
        server=server,
        level="c=2 <4+3>",
        num_requests=2,
        num_tokens=6,
        failures=(),
        wall_seconds=2.0,
        tokens_per_second=tokens_per_second,
        first_token_ms=Quantiles(1.0, 2.0, 3.0),
        between_tokens_ms=Quantiles(4.0, 5.0, 6.0),
        other_cores=other_cores,
    )


def test_the_table_gives_the_ratio_and_marks_a_disturbed_figure() -> None:
    rows = level_table([measurement("millrace", 30.0), measurement("peer", 20.0, other_cores=0.5)])
    ours, theirs = rows.splitlines()[2:]
    assert [cell.strip() for cell in ours.split("|")[2:6]] == ["millrace", "30.0", "30.0", ""]
    assert [cell.strip() for cell in theirs.split("|")[2:6]] == ["peer", "~20.0", "~20.0", "~1.50"]


def test_repetitions_become_their_median_and_disturbed_ones_do_not_count() -> None:
    runs = [measurement("millrace", rate) for rate in (30.0, 32.0, 40.0)]
    runs.append(measurement("millrace", 5.0, other_cores=1.0))
    (row,) = level_table(runs).splitlines()[2:]
    assert [cell.strip() for cell in row.split("|")[3:5]] == ["32.0", "30.0 32.0 40.0 ~5.00"]
