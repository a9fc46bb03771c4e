"""Figures of measured and simulated requests, and the sentence about those that differ."""

from __future__ import annotations

import pytest
from bench.harness.repeats import Repeated, Sample
from bench.parts.client import Answer, Request
from bench.parts.outcome import Outcome
from bench.parts.part import Figures, Table
from bench.policies.outcomes import (
    conclude_ratios,
    median_normalised_ms,
    outcomes_of,
    side_by_side,
    tokens_per_second,
)


def request(output_tokens: int, due: float = 0.0) -> Request:
    return Request(prompt=" ab", prompt_tokens=1, output_tokens=output_tokens, due=due)


def table(**rows: Figures) -> Table:
    return {
        name: {title: Repeated((Sample(value, 0.0),)) for title, value in figures.items()}
        for name, figures in rows.items()
    }


OUTCOMES = [
    Outcome(request(10, due=2.0), 1.0),
    Outcome(request(30, due=4.0), 6.0),
    Outcome(request(20, due=5.0), 0.5),
]


def test_throughput_is_from_the_first_due_time_to_the_last_token() -> None:
    assert tokens_per_second(OUTCOMES) == pytest.approx(60 / (10 - 2))


def test_latency_is_divided_by_the_tokens_of_each_request() -> None:
    # 100, 200 and 25 ms a token.
    assert median_normalised_ms(OUTCOMES) == pytest.approx(100.0)


def test_answers_count_from_their_due_time_or_from_one_moment_for_all() -> None:
    answers = [
        Answer(request(1), due=10.0, ended=13.0),
        Answer(request(1), due=11.0, ended=15.0),
    ]
    assert [outcome.seconds for outcome in outcomes_of(answers)] == [3.0, 4.0]
    assert [outcome.seconds for outcome in outcomes_of(answers, since=12.0)] == [1.0, 3.0]


def test_ratios_are_simulated_over_measured() -> None:
    found = side_by_side({"a": 2.0, "b": 5.0}, {"a": 3.0, "b": 6.0}, {"a": 2.0}, ratios_of=("a",))
    assert found == {
        "a": 2.0,
        "simulated a": 3.0,
        "a: ratio": 1.5,
        "a: ratio in hindsight": 1.0,
        "b": 5.0,
        "simulated b": 6.0,
    }


def test_points_off_by_more_than_a_fifth_are_named() -> None:
    rows = table(
        near={"x: ratio": 1.19, "x: ratio in hindsight": 1.0},
        low={"x: ratio": 0.79, "x: ratio in hindsight": 0.97},
        high={"x: ratio": 1.21, "x: ratio in hindsight": 1.3},
        unsimulated={"x": 1.0},
    )
    line = conclude_ratios(rows, ["x"])
    assert "low, x: 0.79 (0.97 in hindsight); high, x: 1.21 (1.30 in hindsight)" in line
    assert "near" not in line
    assert conclude_ratios({"near": rows["near"]}, ["x"]).endswith("within 20 % at every point.")
