"""The latency predictor, and the calibration that it starts from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.engine import calibration
from millrace_router.engine.calibration import calibrate
from millrace_router.engine.in_flight import InFlight
from millrace_router.engine.predictor import LatencyPredictor, quantile
from millrace_router.errors import QueueFull
from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.forecast import Forecaster, Prediction
from millrace_router.prediction.step_load import StepLoad
from millrace_router.recovery.recovery_policy import RecoveryPolicy
from millrace_router.request.entry import Entry
from millrace_router.request.limits import Limits
from millrace_router.request.request import SchedulingParameters
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.router.fake_router import DirectShards, new_batcher, request, tiny_tokenizer
from millrace_testing.shards.fake_shard import FakeShard
from millrace_testing.shards.hash_tokens import VOCAB_SIZE

COST = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.001))


class Queue:
    """Holds as many requests as the test sets."""

    def __init__(self, num_waiting: int, ahead: tuple[int, int]) -> None:
        self.num_waiting, self.tokens_ahead = num_waiting, ahead

    def __len__(self) -> int:
        return self.num_waiting

    def ahead(self, scheduling: SchedulingParameters, now: float) -> tuple[int, int]:
        return self.tokens_ahead


def predictor_without_costs(queue: Queue) -> LatencyPredictor:
    cost = CostModel()
    forecaster = Forecaster(
        cost, max_batch_size=4, max_batch_prefill_tokens=100, block_size=16, num_blocks=100
    )
    planner = SimpleNamespace(rows={}, num_paused=0, num_paused_tokens=0, num_cached=lambda _: 0)
    return LatencyPredictor(
        cost,
        forecaster,
        Metrics(max_input_tokens=1000, max_total_tokens=1000),
        in_flight=cast("InFlight", SimpleNamespace(plans=[], seconds_in_step=lambda: 0.0)),
        recovery=cast(
            "RecoveryPolicy", SimpleNamespace(planner=planner, num_held=0, num_held_tokens=0)
        ),
        waiting=cast("RequestQueue", queue),
        max_queue_size=1,
    )


def entry(number: int, *, max_queue_seconds: float | None = None) -> Entry:
    valid = request([1, 2, 3], max_new_tokens=5)
    new = Entry(number, valid, tiny_tokenizer(), frozenset(), block_size=16)
    new.scheduling = SchedulingParameters(max_queue_seconds=max_queue_seconds)
    return new


def test_no_wait_is_promised_and_none_is_refused_beforehand() -> None:
    predictor = predictor_without_costs(Queue(0, (50, 50_000)))
    one = entry(0, max_queue_seconds=1e-9)
    assert predictor.predict(one) is None
    predictor.accept(one)
    assert one.stream.predicted_queue_seconds is None


def test_a_refused_request_may_come_again_after_the_mean_of_the_observed_waits() -> None:
    predictor = predictor_without_costs(Queue(1, (1, 100)))
    assert predictor.drain_seconds() == 0.0
    for number in range(200):
        one = entry(number)
        one.stream.batched_at = one.queued_at + 7.0
        predictor.admitted(one)
    assert predictor.drain_seconds() == pytest.approx(7.0, rel=0.01)
    with pytest.raises(QueueFull) as refused:
        predictor.accept(entry(200))
    assert refused.value.retry_after_seconds == 7


def test_the_wait_of_a_mean_request_is_that_of_the_last_ones_while_some_wait() -> None:
    queue = Queue(1, (1, 100))
    predictor = predictor_without_costs(queue)
    for number in range(200):
        one = entry(number)
        one.stream.batched_at = one.queued_at + 7.0
        predictor.admitted(one)
    assert predictor.wait_seconds() == pytest.approx(7.0, rel=0.01)
    queue.num_waiting = 0
    assert predictor.wait_seconds() == 0.0


def test_metrics_show_quantiles_of_prediction_errors() -> None:
    predictor = predictor_without_costs(Queue(0, (0, 0)))
    for number, missed in enumerate([1.0, 2.0, 3.0, 4.0, 10.0]):
        one = entry(number)
        predictor._expected[number] = Prediction(0.0, missed, missed)
        predictor.began(one, one.queued_at)
    series = predictor._metrics.prediction_error
    assert series.labels(prediction="first_token", percentile="50").value == 3.0
    assert series.labels(prediction="first_token", percentile="90").value == 10.0


@settings(deadline=None)
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=60), share=st.floats(0.01, 1.0))
def test_quantile_is_the_least_value_that_a_share_does_not_exceed(
    values: list[float], share: float
) -> None:
    least = quantile(values, share)
    assert least in values
    assert sum(value < least for value in values) < share * len(values)
    assert share * len(values) <= sum(value <= least for value in values) + 1e-9


LIMITS = Limits(max_input_tokens=40, max_total_tokens=48, vocab_size=VOCAB_SIZE)


async def test_calibration_learns_costs_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "SECONDS", 60.0)
    shard = FakeShard(num_blocks=300)
    batcher = new_batcher(DirectShards(shard), shard)
    cost = batcher._predictor.cost
    assert cost.seconds(StepLoad(decodes=1, context=10)) is None
    await calibrate(batcher, LIMITS, max_batch_size=4)
    assert cost.seconds(StepLoad(decodes=1, context=10)) is not None
    assert cost.seconds(StepLoad(prefill_tokens=16, prefill_pairs=136, num_chunks=1)) is not None
    assert not batcher._planner.rows
    assert batcher._planner.blocks.num_owned == 0


def test_a_slow_machine_measures_a_prompt_that_fits_into_the_time_left() -> None:
    long = calibration.ROUNDS[1]
    assert long.within(0.6, 1e-4, max_batch_size=4) == long
    assert long.within(0.6, 4e-3, max_batch_size=4).num_prompt_tokens == 150
    assert long.within(0.6, 1.0, max_batch_size=4).num_prompt_tokens == calibration.LEAST_PROMPT
    many = calibration.ROUNDS[3].within(0.6, 1e-4, max_batch_size=4)
    assert (many.num_requests, many.num_tokens) == (4, 4 * 16 * 6)


async def test_shards_that_fail_are_reported_and_do_not_stop_the_start() -> None:
    shard = FakeShard()
    shard.fail_always = "the device caught fire"
    batcher = new_batcher(DirectShards(shard), shard)
    with structlog.testing.capture_logs() as logs:
        await calibrate(batcher, LIMITS, max_batch_size=4)
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "quarantined" in warning["error"]
