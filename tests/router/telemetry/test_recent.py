"""Rates and percentiles of the last minute."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millrace_router.telemetry.metrics import DURATION_BUCKETS, Metrics
from millrace_router.telemetry.recent import Recent, quantile


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def started() -> tuple[Metrics, Clock, Recent]:
    metrics, clock = Metrics(max_input_tokens=8, max_total_tokens=16), Clock()
    return metrics, clock, Recent(metrics, clock)


def generate(metrics: Metrics, tokens: int, *, first: float = 0.2) -> None:
    """Count one request of so many tokens."""
    metrics.time_to_first_token_seconds.observe(first)
    metrics.inter_token_latency_seconds.observe(0.01, times=tokens - 1)


def test_rates_are_those_of_the_last_minute() -> None:
    metrics, clock, recent = started()
    generate(metrics, 100)
    clock.now += 50.0
    assert recent.window().tokens_per_second == pytest.approx(2.0)
    for _ in range(70):
        clock.now += 1.0
        generate(metrics, 10)
        recent.window()
    window = recent.window()
    assert window.seconds == 60.0
    assert window.tokens_per_second == pytest.approx(10.0)
    assert recent.uptime_seconds == 120.0


def test_who_asks_after_a_while_gets_the_time_since_the_last_question() -> None:
    metrics, clock, recent = started()
    clock.now += 5.0
    recent.window()
    clock.now += 1000.0
    generate(metrics, 500)
    assert recent.window().seconds == 1000.0
    clock.now += 0.25
    assert recent.window().tokens_per_second == pytest.approx(500 / 1000.25)
    clock.now += 1.75
    generate(metrics, 20)
    window = recent.window()
    assert window.seconds == 2.0
    assert window.tokens_per_second == pytest.approx(10.0)


def test_two_who_ask_at_once_see_the_same() -> None:
    metrics, clock, recent = started()
    for _ in range(10):
        clock.now += 2.0
        generate(metrics, 4)
        one = recent.window()
        clock.now += 0.001
        other = recent.window()
        assert other.begin == one.begin
        clock.now -= 0.001


def test_cache_hits_are_a_share_of_the_prompts_of_the_window() -> None:
    metrics, clock, recent = started()
    metrics.prefill_tokens.inc(1000)
    clock.now += 2.0
    assert recent.window().cached_share == 0.0
    clock.now += 90.0
    assert recent.window().cached_share is None
    metrics.prefill_tokens.inc(25)
    metrics.prefix_cache_hit_tokens.inc(75)
    clock.now += 2.0
    assert recent.window().cached_share == 0.75


def test_nothing_has_happened_at_the_start() -> None:
    _, _, recent = started()
    window = recent.window()
    assert (window.seconds, window.tokens_per_second, window.cached_share) == (0.0, 0.0, None)
    assert window.first_token_seconds(0.5) is None


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_percentiles_are_in_the_bucket_of_the_true_ones(share: float) -> None:
    metrics, clock, recent = started()
    random.seed(3)
    for _ in range(50):
        metrics.time_to_first_token_seconds.observe(100.0)
    clock.now += 100.0
    recent.window()
    values = [random.lognormvariate(-2, 1) for _ in range(999)]
    for value in values:
        metrics.time_to_first_token_seconds.observe(value)
    clock.now += 10.0
    found = recent.window().first_token_seconds(share)
    assert found is not None
    bounds = np.array([0.0, *DURATION_BUCKETS])
    expected = np.quantile(values, share, method="inverted_cdf")
    at = int(np.searchsorted(bounds, expected))
    assert bounds[at - 1] <= found <= bounds[at]


def test_quantile_handles_empty_and_outermost_buckets() -> None:
    assert quantile([1.0, 2.0], [0, 0, 0], 0.5) is None
    assert quantile([1.0, 2.0], [4, 0, 0], 0.5) == 0.5
    assert quantile([1.0, 2.0], [0, 4, 0], 0.25) == 1.25
    assert quantile([1.0, 2.0], [0, 0, 3], 0.5) == 2.0
