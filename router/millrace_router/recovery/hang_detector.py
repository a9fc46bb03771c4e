"""Looks after the shards from outside the scheduling loop: whether a step hangs, and whether they are there at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.shards.errors import ShardError, ShardHung

HEARTBEAT_SECONDS = 1.0
"""How often idle shards are asked whether they are there."""


class Oldest(NamedTuple):
    """The oldest step in flight."""

    number: int
    step: object
    load: StepLoad


class HangDetector:
    """Watches for ever, and reports to `alarm` what it finds."""

    def __init__(
        self,
        watchdog: StepTimer,
        *,
        oldest: Callable[[], Oldest | None],
        is_idle: Callable[[], bool],
        ask: Callable[[], Awaitable[object]],
        alarm: Callable[[ShardError], None],
    ) -> None:
        """`ask` asks the shards for their health; it raises ShardError, or is cancelled when their channel goes."""
        self._watchdog = watchdog
        self._oldest = oldest
        self._is_idle = is_idle
        self._ask = ask
        self._alarm = alarm

    async def run(self) -> None:
        """Watch until cancelled."""
        then = asked_at = time.monotonic()
        while True:
            await asyncio.sleep(self._watchdog.tick_seconds)
            now = time.monotonic()
            seconds, then = now - then, now
            oldest = self._oldest()
            if oldest is not None:
                if self._watchdog.is_hung(oldest.step, oldest.load, seconds):
                    self._alarm(ShardHung(f"step {oldest.number} does not end"))
            elif self._is_idle() and now - asked_at >= HEARTBEAT_SECONDS:
                asked_at = now
                await self._ask_for_health()

    async def _ask_for_health(self) -> None:
        try:
            await self._ask()
        except ShardError as error:
            # If steps are under way again, they tell.
            if self._is_idle():
                self._alarm(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # A channel that is discarded cancels its calls, though nobody cancelled this task.


SLOWEST = 30.0
"""How many times longer than predicted a step may take: a busy neighbour made steps on a CPU 12 to 29 times slower."""
TICK_SECONDS = 0.5


class StepTimer:
    """Adds up the time that the oldest step has been running, tick by tick.

    Its own ticks and not the clock, because a router that was stopped for a while must not take that for the shards'
    doing: a tick counts as two at most.
    """

    def __init__(self, floor_seconds: float, cost: CostModel) -> None:
        self._floor_seconds = floor_seconds
        self._cost = cost
        self._step: object = None
        self._seconds = 0.0

    @property
    def tick_seconds(self) -> float:
        """How often to look."""
        return min(TICK_SECONDS, self._floor_seconds / 4)

    def limit_seconds(self, load: StepLoad) -> float:
        """How long a step of this size may take."""
        predicted = self._cost.seconds(load)
        return max(self._floor_seconds, SLOWEST * (predicted or 0.0))

    def is_hung(self, step: object, load: StepLoad, seconds: float) -> bool:
        """Whether `step`, the oldest in flight, has been running for too long, `seconds` after the last look."""
        if step is not self._step:
            self._step, self._seconds = step, 0.0
            return False
        self._seconds += min(seconds, 2 * self.tick_seconds)
        return self._seconds > self.limit_seconds(load)
