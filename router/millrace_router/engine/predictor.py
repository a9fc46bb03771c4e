"""Predictions for requests: made on arrival, used to refuse requests that would wait too long, compared afterwards."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection
from functools import partial

from millrace_router.engine.adapter_hooks import AdapterHooks
from millrace_router.engine.in_flight import InFlight
from millrace_router.errors import QueueFull, QueueTooLong
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.forecast import Estimate, Forecaster, Prediction
from millrace_router.prediction.step_load import StepLoad
from millrace_router.recovery.recovery_policy import RecoveryPolicy
from millrace_router.request.entry import Entry
from millrace_router.request.request import SchedulingParameters
from millrace_router.scheduler.multi_token import Progress
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.telemetry.metrics import Metrics

_QUEUE_RATE = 1 / 16
"""Weight of one admitted request in the mean of observed queue times."""
_NUM_ERRORS = 1000
"""Predictions whose errors the metrics show."""


class LatencyPredictor:
    """Predicts from the current state of queue, batch and adapters, by a cost model that learns from every step."""

    def __init__(  # noqa: PLR0913
        self,
        cost: CostModel,
        forecaster: Forecaster,
        metrics: Metrics,
        *,
        in_flight: InFlight,
        recovery: RecoveryPolicy,
        waiting: RequestQueue,
        adapters: AdapterHooks | None = None,
        max_queue_size: int | None = None,
    ) -> None:
        """`max_queue_size` limits the entries that wait; the scheduling parameters of a request limit its own wait."""
        self.cost = cost
        self._forecaster = forecaster
        self._in_flight = in_flight
        self._recovery = recovery
        self._waiting = waiting
        self._adapters = adapters or AdapterHooks()
        self._max_queue_size = max_queue_size
        self._queue_errors: deque[float] = deque(maxlen=_NUM_ERRORS)
        self._first_token_errors: deque[float] = deque(maxlen=_NUM_ERRORS)
        self._metrics = metrics
        self._expected: dict[int, Prediction] = {}
        self._mean_queue_seconds = 0.0

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting) + self._adapters.num_waiting

    def predict(self, entry: Entry) -> Prediction | None:
        """Predict the latencies of `entry` if it joins the queue now; None while nothing is known."""
        num_cached = self._recovery.planner.num_cached(entry)
        prediction = self._predict(
            entry.scheduling,
            num_prompt_tokens=entry.num_prompt_tokens,
            max_new_tokens=entry.max_new_tokens,
            num_cached=num_cached,
        )
        if prediction is None:
            return None
        # It keeps its place in the queue by age, so it does not wait for its turn again after its adapter has come.
        prediction = prediction.after(self._adapter_seconds(entry))
        if not entry.images:
            return prediction
        encoding = self._encoding_seconds(entry, num_cached)
        return None if encoding is None else prediction.after(prediction.queue_seconds + encoding)

    def estimate(self, entry: Entry) -> Estimate:
        """Predict the times of `entry` if it arrived now."""
        planner = self._recovery.planner
        return Estimate(
            prediction=self.predict(entry),
            num_cached=planner.num_cached(entry),
            num_tiles=math.ceil(self._tiles_left(entry, planner.num_cached(entry))[0]),
            num_waiting=self._num_waiting + planner.num_paused + self._recovery.num_held,
            num_running=len(planner.rows),
        )

    def drain_seconds(self) -> float:
        """Predict the seconds until a request ahead has left the queue, or a running one has ended.

        Without a prediction this is the mean of the observed queue times.
        """
        num_ahead, num_tokens = self._ahead(SchedulingParameters())
        predicted = self._forecaster.drain_seconds(
            self._recovery.planner.rows.values(),
            waiting=(max(1, num_ahead), max(1, num_tokens)),
            now_in_step=self._in_flight.seconds_in_step(),
        )
        return self._mean_queue_seconds if predicted is None else predicted

    def wait_seconds(self) -> float:
        """Predict the seconds that a mean request waits behind all that are ahead.

        Without a prediction this is the mean of the observed queue times while requests wait, and 0 otherwise.
        """
        num_prompt, num_new = self._forecaster.mean_request(self._recovery.planner.rows.values())
        prediction = self._predict(
            SchedulingParameters(), num_prompt_tokens=num_prompt, max_new_tokens=num_new
        )
        if prediction is not None:
            return prediction.queue_seconds
        return self._mean_queue_seconds if self._num_waiting else 0.0

    def accept(self, entry: Entry) -> None:
        """Predict the latencies of `entry`, and keep the prediction.

        Raises:
            QueueFull: the queue is full.
            QueueTooLong: the entry would wait longer than its scheduling parameters allow.

        """
        prediction = self.predict(entry)
        wait = self._adapter_seconds(entry) if prediction is None else prediction.queue_seconds
        allowed = entry.scheduling.max_queue_seconds
        if allowed is not None and wait > allowed:
            raise QueueTooLong(predicted_seconds=wait, allowed_seconds=allowed)
        max_size = self._max_queue_size
        if max_size is not None and self._num_waiting >= max_size:
            raise QueueFull(max_size, retry_after_seconds=self.drain_seconds())
        if prediction is not None:
            self._expected[entry.request_id] = prediction
            entry.stream.predicted_queue_seconds = prediction.queue_seconds

    def admitted(self, entry: Entry) -> None:
        """Compare the predicted with the realised time in the queue."""
        stream = entry.stream
        if stream.batched_at is None or entry.num_preemptions:
            return
        seconds = stream.batched_at - stream.queued_at
        self._mean_queue_seconds += _QUEUE_RATE * (seconds - self._mean_queue_seconds)
        prediction = self._expected.get(entry.request_id)
        if prediction is not None:
            self._add_error("queue", self._queue_errors, prediction.queue_seconds - seconds)

    def began(self, entry: Entry, now: float) -> None:
        """Compare the predicted with the realised time to the first token."""
        prediction = self._expected.pop(entry.request_id, None)
        if prediction is not None:
            error = prediction.first_token_seconds - (now - entry.queued_at)
            self._add_error("first_token", self._first_token_errors, error)

    def ended(self, entry: Entry) -> None:
        """Learn from the length of the answer."""
        self._expected.pop(entry.request_id, None)
        if entry.num_generated:
            limit = entry.num_generated if entry.closed else entry.max_new_tokens
            self._forecaster.traffic.finished(
                num_prompt=entry.num_prompt_tokens,
                num_generated=entry.num_generated,
                max_new_tokens=limit,
                num_cached=entry.stream.cached_tokens or 0,
            )

    def yielded(self, progress: Progress) -> None:
        """Learn how many tokens a multi-token row yields in a step."""
        if progress.num_rows:
            self._forecaster.traffic.yielded(progress.num_tokens, progress.num_rows)

    def _predict(
        self,
        scheduling: SchedulingParameters,
        *,
        num_prompt_tokens: int,
        max_new_tokens: int,
        num_cached: int = 0,
    ) -> Prediction | None:
        return self._forecaster.predict(
            self._recovery.planner.rows.values(),
            ahead=self._ahead(scheduling),
            num_prompt_tokens=num_prompt_tokens,
            max_new_tokens=max_new_tokens,
            num_cached=num_cached,
            now_in_step=self._in_flight.seconds_in_step(),
            in_flight=[plan.load for plan in self._in_flight.plans],
        )

    def _ahead(self, scheduling: SchedulingParameters) -> tuple[int, int]:
        """Entries that are served before one that arrives now, and their prompt tokens."""
        planner, recovery = self._recovery.planner, self._recovery
        num_ahead, tokens_ahead = self._waiting.ahead(scheduling, time.monotonic())
        return (
            num_ahead + planner.num_paused + recovery.num_held,
            tokens_ahead + planner.num_paused_tokens + recovery.num_held_tokens,
        )

    def _adapter_seconds(self, entry: Entry) -> float:
        return 0.0 if entry.adapter is None else self._adapters.expected_seconds(entry.adapter)

    def _tiles_left(self, entry: Entry, num_cached: int) -> tuple[float, float]:
        images = self._recovery.planner.images
        if images is None or not entry.images:
            return 0.0, 0.0
        return images.cost_left(entry, num_cached)

    def _encoding_seconds(self, entry: Entry, num_cached: int) -> float | None:
        """Seconds until the images of an admissible request are encoded; None before the first tile of all.

        A step with a tile is followed by one for the rows that run.
        """
        own, ahead = self._tiles_left(entry, num_cached)
        if not own:
            return 0.0
        if not self.cost.tile_seconds:
            return None
        rows = self._recovery.planner.rows.values()
        load = StepLoad(decodes=len(rows), context=sum([row.num_kv_tokens for row in rows]))
        between = (self.cost.seconds(load) or 0.0) if rows else 0.0
        return (own + ahead) * (self.cost.tile_seconds + between)

    def _add_error(self, prediction: str, errors: deque[float], error: float) -> None:
        """Count the error of a prediction; a scrape shows the quantiles of the last ones."""
        if not errors:
            series = self._metrics.prediction_error
            for percentile in (50, 90):
                gauge = series.labels(prediction=prediction, percentile=str(percentile))
                gauge.follow(partial(quantile, errors, percentile / 100))
        errors.append(abs(error))


def quantile(values: Collection[float], share: float) -> float:
    """Return the least of `values` that a `share` of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
