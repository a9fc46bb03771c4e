"""Detects shards that hang in a step, and idle shards that do not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.shards.errors import ShardError, ShardHung

HEARTBEAT_SECONDS = 1.0
"""Period of the health checks of idle shards."""


class OldestStep(NamedTuple):
    """The oldest step in flight."""

    number: int
    step: object
    """Identifies the step across epochs."""
    load: StepLoad


class HangDetector:
    """Watches the oldest step while steps are in flight, and checks the health of the shards otherwise."""

    def __init__(
        self,
        timer: StepTimer,
        *,
        oldest: Callable[[], OldestStep | None],
        is_idle: Callable[[], bool],
        check: Callable[[], Awaitable[object]],
        report: Callable[[ShardError], None],
    ) -> None:
        """`check` is a health check; it raises ShardError, or is cancelled when its channel is closed.

        `report` receives the failures that are found.
        """
        self._timer = timer
        self._oldest = oldest
        self._is_idle = is_idle
        self._check = check
        self._report = report

    async def run(self) -> None:
        last_tick = last_check = time.monotonic()
        while True:
            await asyncio.sleep(self._timer.tick_seconds)
            now = time.monotonic()
            seconds, last_tick = now - last_tick, now
            oldest = self._oldest()
            if oldest is not None:
                if self._timer.is_hung(oldest.step, oldest.load, seconds):
                    self._report(ShardHung(f"step {oldest.number} does not end"))
            elif self._is_idle() and now - last_check >= HEARTBEAT_SECONDS:
                last_check = now
                await self._check_health()

    async def _check_health(self) -> None:
        try:
            await self._check()
        except ShardError as error:
            # If steps are in flight again, they report the failure.
            if self._is_idle():
                self._report(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # A closed channel cancels its calls, but not this task.


SLOWEST = 30.0
"""Limit of a step over its prediction: a busy neighbour made steps on a CPU 12 to 29 times slower."""
TICK_SECONDS = 0.5


class StepTimer:
    """Adds up the ticks during which the oldest step ran.

    A tick counts as two at most. So the time in which the router itself was stopped does not count as the shards'.
    """

    def __init__(self, floor_seconds: float, cost: CostModel) -> None:
        """Every step may take `floor_seconds`."""
        self._floor_seconds = floor_seconds
        self._cost = cost
        self._step: object = None
        self._seconds = 0.0

    @property
    def tick_seconds(self) -> float:
        """Seconds between two ticks."""
        return min(TICK_SECONDS, self._floor_seconds / 4)

    def limit_seconds(self, load: StepLoad) -> float:
        """Return the longest duration of a step of this load."""
        predicted = self._cost.seconds(load)
        return max(self._floor_seconds, SLOWEST * (predicted or 0.0))

    def is_hung(self, step: object, load: StepLoad, seconds: float) -> bool:
        """Return whether `step`, the oldest in flight, runs for too long; called `seconds` after the last tick."""
        if step is not self._step:
            self._step, self._seconds = step, 0.0
            return False
        self._seconds += min(seconds, 2 * self.tick_seconds)
        return self._seconds > self.limit_seconds(load)
