"""Predictions for requests: made on arrival, used to refuse requests that would wait too long, compared afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace_router.errors import QueueFull, QueueTooLong
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.error_tracker import ErrorTracker
from millrace_router.prediction.forecast import Forecaster, Prediction
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.entry import Entry
from millrace_router.scheduler.multi_token import Progress
from millrace_router.scheduler.step_plan import Row
from millrace_router.telemetry.metrics import Metrics

_QUEUE_RATE = 1 / 16
"""Weight of one admitted request in the mean of observed queue times."""


@dataclass(slots=True)
class SchedulerSnapshot:
    """The state of the scheduler that a prediction starts from."""

    rows: Iterable[Row]
    num_waiting: int
    ahead: tuple[int, int]
    """Number of entries that are served before, and their prompt tokens."""
    now_in_step: float
    """Seconds that the oldest step in flight has run."""
    in_flight: Sequence[StepLoad] = ()
    """The loads of the steps in flight, the oldest first."""
    adapter_seconds: float = 0.0
    """How long the request waits for its adapter before it joins the queue."""


class LatencyPredictor:
    """Predicts latencies by a cost model that learns from every step, and tracks its own errors."""

    def __init__(
        self,
        cost: CostModel,
        forecaster: Forecaster,
        metrics: Metrics,
        *,
        max_queue_size: int | None = None,
    ) -> None:
        """`max_queue_size` limits the entries that wait; the scheduling parameters of a request limit its own wait."""
        self.cost = cost
        self._forecaster = forecaster
        self._metrics = metrics
        self._max_queue_size = max_queue_size
        self._queue_errors = ErrorTracker()
        self._first_token_errors = ErrorTracker()
        self._expected: dict[int, Prediction] = {}
        self._mean_queue_seconds = 0.0

    def predict(
        self, entry: Entry, snapshot: SchedulerSnapshot, *, num_cached: int
    ) -> Prediction | None:
        """Predict the latencies of `entry` if it joins the queue now; None while nothing is known."""
        prediction = self._forecaster.predict(
            snapshot.rows,
            ahead=snapshot.ahead,
            num_prompt_tokens=entry.num_prompt_tokens,
            max_new_tokens=entry.max_new_tokens,
            num_cached=num_cached,
            now_in_step=snapshot.now_in_step,
            in_flight=snapshot.in_flight,
        )
        # It keeps its place in the queue by age, so it does not wait for its turn again after that.
        return None if prediction is None else prediction.after(snapshot.adapter_seconds)

    def drain_seconds(self, snapshot: SchedulerSnapshot) -> float:
        """Predict the seconds until a request ahead has left the queue, or a running one has ended.

        Without a prediction this is the mean of the observed queue times.
        """
        num_ahead, num_tokens = snapshot.ahead
        predicted = self._forecaster.drain_seconds(
            snapshot.rows,
            waiting=(max(1, num_ahead), max(1, num_tokens)),
            now_in_step=snapshot.now_in_step,
        )
        return self._mean_queue_seconds if predicted is None else predicted

    def wait_seconds(self, snapshot: SchedulerSnapshot) -> float:
        """Predict the seconds that a mean request waits behind all that are ahead.

        Without a prediction this is the mean of the observed queue times while requests wait, and 0 otherwise.
        """
        num_prompt_tokens, max_new_tokens = self._forecaster.mean_request(snapshot.rows)
        prediction = self._forecaster.predict(
            snapshot.rows,
            ahead=snapshot.ahead,
            num_prompt_tokens=num_prompt_tokens,
            max_new_tokens=max_new_tokens,
            now_in_step=snapshot.now_in_step,
            in_flight=snapshot.in_flight,
        )
        if prediction is not None:
            return prediction.queue_seconds
        return self._mean_queue_seconds if snapshot.num_waiting else 0.0

    def accept(self, entry: Entry, snapshot: SchedulerSnapshot, *, num_cached: int) -> None:
        """Predict the latencies of `entry`, and keep the prediction.

        Raises:
            QueueFull: the queue has no room.
            QueueTooLong: the entry would wait longer than its scheduling parameters allow.

        """
        prediction = self.predict(entry, snapshot, num_cached=num_cached)
        wait = snapshot.adapter_seconds if prediction is None else prediction.queue_seconds
        allowed = entry.scheduling.max_queue_seconds
        if allowed is not None and wait > allowed:
            raise QueueTooLong(predicted_seconds=wait, allowed_seconds=allowed)
        max_size = self._max_queue_size
        if max_size is not None and snapshot.num_waiting >= max_size:
            raise QueueFull(max_size, retry_after_seconds=self.drain_seconds(snapshot))
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
            self._queue_errors.add(prediction.queue_seconds, seconds)
            self._publish("queue", self._queue_errors)

    def began(self, entry: Entry, now: float) -> None:
        """Compare the predicted with the realised time to the first token."""
        prediction = self._expected.pop(entry.request_id, None)
        if prediction is not None:
            self._first_token_errors.add(prediction.first_token_seconds, now - entry.queued_at)
            self._publish("first_token", self._first_token_errors)

    def ended(self, entry: Entry) -> None:
        """Learn from the length of the answer."""
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
        """Learn how many tokens a multi-token row yields in a step."""
        if progress.num_rows:
            self._forecaster.yielded(progress.num_tokens, progress.num_rows)

    def _publish(self, prediction: str, tracker: ErrorTracker) -> None:
        error = self._metrics.prediction_error
        error.labels(prediction=prediction, percentile="50").set(tracker.median())
        error.labels(prediction=prediction, percentile="90").set(tracker.p90())
