"""Waits of requests where nothing is predicted: without chunked prefill."""

from __future__ import annotations

import pytest

from millrace_router.engine.predictor import LatencyPredictor, SchedulerSnapshot
from millrace_router.errors import QueueFull
from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.forecast import Forecaster
from millrace_router.request.entry import Entry
from millrace_router.request.request import SchedulingParameters
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.router.fake_router import request, tiny_tokenizer

COST = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.001))
FULL = SchedulerSnapshot(rows=(), num_waiting=1, ahead=(1, 100), now_in_step=0.0)


def predictor_without_chunks() -> LatencyPredictor:
    forecaster = Forecaster(
        COST,
        max_batch_size=4,
        max_batch_prefill_tokens=100,
        block_size=16,
        num_blocks=100,
        predicts=False,
    )
    metrics = Metrics(max_input_tokens=1000, max_total_tokens=1000)
    return LatencyPredictor(COST, forecaster, metrics, max_queue_size=1)


def entry(number: int, *, max_queue_seconds: float | None = None) -> Entry:
    asked = request([1, 2, 3], max_new_tokens=5)
    found = Entry(number, asked, tiny_tokenizer(), frozenset(), block_size=16)
    found.scheduling = SchedulingParameters(max_queue_seconds=max_queue_seconds)
    return found


def test_no_wait_is_promised_and_none_is_refused_beforehand() -> None:
    predictor = predictor_without_chunks()
    one = entry(0, max_queue_seconds=1e-9)
    idle = SchedulerSnapshot(rows=(), num_waiting=0, ahead=(50, 50_000), now_in_step=0.0)
    assert predictor.predict(one, idle, num_cached=0) is None
    predictor.accept(one, idle, num_cached=0)
    assert one.stream.predicted_queue_seconds is None


def test_a_refused_request_may_come_again_after_the_mean_of_the_observed_waits() -> None:
    predictor = predictor_without_chunks()
    assert predictor.drain_seconds(FULL) == 0.0
    for number in range(200):
        one = entry(number)
        one.stream.batched_at = one.queued_at + 7.0
        predictor.admitted(one)
    assert predictor.drain_seconds(FULL) == pytest.approx(7.0, rel=0.01)
    with pytest.raises(QueueFull) as refused:
        predictor.accept(entry(200), FULL, num_cached=0)
    assert refused.value.retry_after_seconds == 7


def test_the_wait_of_a_mean_request_is_that_of_the_last_ones_while_some_wait() -> None:
    predictor = predictor_without_chunks()
    for number in range(200):
        one = entry(number)
        one.stream.batched_at = one.queued_at + 7.0
        predictor.admitted(one)
    assert predictor.wait_seconds(FULL) == pytest.approx(7.0, rel=0.01)
    idle = SchedulerSnapshot(rows=(), num_waiting=0, ahead=(0, 0), now_in_step=0.0)
    assert predictor.wait_seconds(idle) == 0.0
