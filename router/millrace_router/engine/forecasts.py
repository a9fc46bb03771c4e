"""Predictions for requests from the current state of queue, batch and adapters."""

from __future__ import annotations

import time

from millrace_router.engine.in_flight import InFlight
from millrace_router.engine.no_adapters import NoAdapters
from millrace_router.engine.predictor import LatencyPredictor, SchedulerSnapshot
from millrace_router.prediction.estimate import Estimate
from millrace_router.recovery.recovery_policy import RecoveryPolicy
from millrace_router.request.entry import Entry
from millrace_router.request.request import SchedulingParameters
from millrace_router.scheduler.queue import RequestQueue


class Forecasts:
    """Reads the state of the engine; changes nothing of it."""

    def __init__(
        self,
        predictor: LatencyPredictor,
        in_flight: InFlight,
        recovery: RecoveryPolicy,
        *,
        waiting: RequestQueue,
        adapters: NoAdapters,
    ) -> None:
        self._predictor = predictor
        self._in_flight = in_flight
        self._recovery = recovery
        self._waiting = waiting
        self._adapters = adapters

    def accept(self, entry: Entry) -> None:
        """Predict the latencies of `entry`, and keep the prediction; raises Overloaded."""
        num_cached = self._recovery.planner.num_cached(entry)
        self._predictor.accept(entry, self._snapshot(entry), num_cached=num_cached)

    def estimate(self, entry: Entry) -> Estimate:
        """Predict the times of `entry` if it arrived now."""
        planner = self._recovery.planner
        num_cached = planner.num_cached(entry)
        return Estimate(
            prediction=self._predictor.predict(entry, self._snapshot(entry), num_cached=num_cached),
            num_cached=num_cached,
            num_waiting=self._num_waiting + planner.num_paused + self._recovery.num_held,
            num_running=len(planner.rows),
        )

    def drain_seconds(self) -> float:
        """Predict the seconds until one more request fits."""
        return self._predictor.drain_seconds(self._state(SchedulingParameters()))

    def wait_seconds(self) -> float:
        """Predict the seconds that a mean request would wait in the queue if it arrived now."""
        return self._predictor.wait_seconds(self._state(SchedulingParameters()))

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting) + self._adapters.num_waiting

    def _snapshot(self, entry: Entry) -> SchedulerSnapshot:
        snapshot = self._state(entry.scheduling)
        if entry.adapter is not None:
            snapshot.adapter_seconds = self._adapters.expected_seconds(entry.adapter)
        return snapshot

    def _state(self, scheduling: SchedulingParameters) -> SchedulerSnapshot:
        planner, recovery = self._recovery.planner, self._recovery
        num_ahead, tokens_ahead = self._waiting.ahead(scheduling, time.monotonic())
        num_ahead += planner.num_paused + recovery.num_held
        tokens_ahead += planner.num_paused_tokens + recovery.num_held_tokens
        return SchedulerSnapshot(
            rows=planner.rows.values(),
            num_waiting=self._num_waiting,
            ahead=(num_ahead, tokens_ahead),
            now_in_step=self._in_flight.seconds_in_step(),
            in_flight=[plan.load for plan in self._in_flight.plans],
        )
