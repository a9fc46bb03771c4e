"""Metrics of one request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from millrace_router.errors import RouterError
from millrace_router.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations of the parts of a request, in seconds."""

    arrived_at: float = 0.0
    """By `time.monotonic`."""
    total: float
    validation: float
    queue: float
    inference: float
    per_token: float
    predicted_queue: float | None = None
    """Prediction of `queue`; None if nothing was known."""
    first_token: float | None = None
    """From arrival until the first token was passed to its sink; None without a token."""


class RequestRecord:
    """Counts one request: each token when it arrives, and exactly one end."""

    def __init__(
        self,
        metrics: Metrics,
        on_failure: Callable[[RouterError], None],
        on_token: Callable[[], None],
    ) -> None:
        self.arrived_at = time.monotonic()
        self._metrics = metrics
        self._on_failure = on_failure
        self._on_token = on_token
        self.first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._ended = False
        metrics.request_count.inc()

    def sibling(self) -> RequestRecord:
        """The record of another sample of the same request; it counts as a request of its own."""
        other = RequestRecord(self._metrics, self._on_failure, self._on_token)
        other.arrived_at = self.arrived_at
        return other

    def token(self) -> None:
        """Count a token that is passed to its sink now."""
        now = time.monotonic()
        if self._last_token_at is None:
            self.first_token_at = now
            self._metrics.time_to_first_token_seconds.observe(now - self.arrived_at)
        else:
            self._metrics.inter_token_latency_seconds.observe(now - self._last_token_at)
        self._last_token_at = now
        self._on_token()

    def succeeded(self, timings: Timings, generated_tokens: int) -> None:
        """Count a normal end."""
        self._ended = True
        self._on_token()
        metrics = self._metrics
        metrics.request_success.inc()
        metrics.request_duration.observe(timings.total)
        metrics.request_validation_duration.observe(timings.validation)
        metrics.request_queue_duration.observe(timings.queue)
        metrics.request_inference_duration.observe(timings.inference)
        metrics.request_mean_time_per_token_duration.observe(timings.per_token)
        metrics.request_generated_tokens.observe(generated_tokens)

    def failed(self, error: RouterError) -> None:
        """Count an error, once."""
        error.is_counted = True
        if self._ended:
            return
        self._ended = True
        if error.failure_label is not None:
            self._metrics.request_failure.labels(err=error.failure_label).inc()
        self._on_failure(error)

    def left(self) -> None:
        """Count a client that disconnected before the end; without effect after the end."""
        if not self._ended:
            self._ended = True
            self._metrics.request_failure.labels(err="dropped").inc()
