"""What is to be expected of a request: predicted when it comes, refused when it is hopeless, compared afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millrace_router.errors import QueueFull, QueueTooLong
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.error_tracker import ErrorTracker
from millrace_router.prediction.forecast import Forecaster, Prediction
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.entry import Entry
from millrace_router.scheduler.multi_token import Progress
from millrace_router.scheduler.row import Row
from millrace_router.telemetry.metrics import Metrics

_QUEUE_RATE = 1 / 16
"""Weight of one admitted request in the mean of observed queue times."""


@dataclass(slots=True)
class SchedulerSnapshot:
    """The state of the scheduler that a prediction starts from."""

    rows: Iterable[Row]
    num_waiting: int
    ahead: tuple[int, int]
    """Entries that are served before, and their prompt tokens."""
    now_in_step: float
    """Seconds that the oldest step in flight has run."""


class LatencyPredictor:
    """Forecasts by a cost model that learns from every step, and keeps count of its own errors."""

    def __init__(
        self,
        cost: CostModel,
        forecaster: Forecaster,
        metrics: Metrics,
        *,
        max_queue_size: int | None = None,
    ) -> None:
        """`max_queue_size` entries may wait; how long one may wait is among its scheduling parameters."""
        self.cost = cost
        self._forecaster = forecaster
        self._metrics = metrics
        self._max_queue_size = max_queue_size
        self._queue_audit = ErrorTracker()
        self._first_token_audit = ErrorTracker()
        self._expected: dict[int, Prediction] = {}
        self._mean_queue_seconds = 0.0

    def predict(
        self, entry: Entry, outlook: SchedulerSnapshot, *, num_cached: int
    ) -> Prediction | None:
        """How `entry` fares if it joins the queue now; None while nothing is known."""
        return self._forecaster.predict(
            outlook.rows,
            ahead=outlook.ahead,
            num_prompt_tokens=entry.num_prompt_tokens,
            max_new_tokens=entry.max_new_tokens,
            num_cached=num_cached,
            now_in_step=outlook.now_in_step,
        )

    def drain_seconds(self, outlook: SchedulerSnapshot) -> float:
        """Seconds until one of the requests ahead has left the queue, or a running one has ended.

        The mean of the observed queue times where nothing is predicted.
        """
        num_ahead, num_tokens = outlook.ahead
        predicted = self._forecaster.drain_seconds(
            outlook.rows,
            waiting=(max(1, num_ahead), max(1, num_tokens)),
            now_in_step=outlook.now_in_step,
        )
        return self._mean_queue_seconds if predicted is None else predicted

    def accept(self, entry: Entry, outlook: SchedulerSnapshot, *, num_cached: int) -> None:
        """Predict, and remember it of `entry`.

        Raises:
            QueueFull: no more may wait.
            QueueTooLong: it would wait longer than its scheduling parameters allow.

        """
        prediction = self.predict(entry, outlook, num_cached=num_cached)
        wait = 0.0 if prediction is None else prediction.queue_seconds
        allowed = entry.scheduling.max_queue_seconds
        if allowed is not None and wait > allowed:
            raise QueueTooLong(predicted_seconds=wait, allowed_seconds=allowed)
        max_size = self._max_queue_size
        if max_size is not None and outlook.num_waiting >= max_size:
            raise QueueFull(max_size, retry_after_seconds=self.drain_seconds(outlook))
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
            self._queue_audit.add(prediction.queue_seconds, seconds)
            self._publish("queue", self._queue_audit)

    def began(self, entry: Entry, now: float) -> None:
        """Compare the predicted with the realised time to the first token."""
        prediction = self._expected.pop(entry.request_id, None)
        if prediction is not None:
            self._first_token_audit.add(prediction.first_token_seconds, now - entry.queued_at)
            self._publish("first_token", self._first_token_audit)

    def ended(self, entry: Entry) -> None:
        """Learn how long the answer got."""
        self._expected.pop(entry.request_id, None)
        if entry.num_generated:
            limit = entry.num_generated if entry.closed else entry.max_new_tokens
            self._forecaster.finished(
                num_prompt=entry.num_prompt_tokens,
                num_generated=entry.num_generated,
                max_new_tokens=limit,
                num_cached=entry.stream.cached_tokens or 0,
            )

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        self.cost.observe(load, seconds)

    def yielded(self, progress: Progress) -> None:
        """Learn how many tokens rows yield at once, of those that may yield several."""
        if progress.num_rows:
            self._forecaster.yielded(progress.num_tokens, progress.num_rows)

    def _publish(self, what: str, audit: ErrorTracker) -> None:
        error = self._metrics.prediction_error
        error.labels(prediction=what, percentile="50").set(audit.median())
        error.labels(prediction=what, percentile="90").set(audit.p90())
