"""Detects shards that hang in a step, and shards that do not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from millrace_router.prediction.cost import FIRST_PROMPT_TOKENS, CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.shards.errors import ShardError, ShardHung

HEARTBEAT_SECONDS = 1.0
"""Longest period of the calls that show whether the shards are alive."""


class OldestStep(NamedTuple):
    """The oldest step in flight."""

    number: int
    step: object
    """Identifies the step across epochs."""
    load: StepLoad


class HangDetector:
    """Watches the oldest step in flight, and asks the shards for a sign of life during long steps and while they idle.

    A step hangs when the shards compute no layer of it for too long. A slow step does not hang, however long it takes.
    """

    def __init__(
        self,
        timer: StepTimer,
        *,
        oldest: Callable[[], OldestStep | None],
        is_idle: Callable[[], bool],
        pulse: Callable[[], Awaitable[int]],
        report: Callable[[ShardError], None],
    ) -> None:
        """`pulse` returns a number that changes while the shards compute; it is also the health check of idle shards.

        It raises ShardError, or is cancelled when its channel is closed. `report` receives the failures that are found.
        """
        self._timer = timer
        self._oldest = oldest
        self._is_idle = is_idle
        self._pulse = pulse
        self._report = report

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_steps())
            tasks.create_task(self._listen())

    async def _watch_steps(self) -> None:
        last_tick = time.monotonic()
        while True:
            await asyncio.sleep(self._timer.tick_seconds)
            now = time.monotonic()
            seconds, last_tick = now - last_tick, now
            oldest = self._oldest()
            if oldest is not None and self._timer.is_hung(oldest.step, oldest.load, seconds):
                self._report(ShardHung(f"step {oldest.number} does not end: nothing is computed"))

    async def _listen(self) -> None:
        """Ask for the pulse of idle shards, and of those whose step lasts: a short step costs no call."""
        while True:
            await asyncio.sleep(self._timer.heartbeat_seconds)
            oldest = self._oldest()
            if self._is_idle() or (oldest is not None and self._timer.lasts(oldest.step)):
                await self._ask(oldest)

    async def _ask(self, oldest: OldestStep | None) -> None:
        """Ask for the pulse while `oldest` is the oldest step."""
        try:
            pulse = await self._pulse()
        except ShardError as error:
            # A step in flight reports a broken stream by itself, but not that the shards are silent.
            is_silent = isinstance(error, ShardHung) and self._is_silent(oldest)
            if self._is_idle() or is_silent:
                self._report(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # A closed channel cancels its calls, but not this task.
        else:
            if oldest is not None:
                self._timer.felt(oldest.step, pulse)

    def _is_silent(self, before: OldestStep | None) -> bool:
        """Return whether the oldest step is the same as `before`, and has shown no sign of life in between."""
        now = self._oldest()
        if before is None or now is None or now.step is not before.step:
            return False
        return self._timer.is_silent(now.step)


SLOWEST = 30.0
"""Limit of the time without a sign of life, over the predicted duration of the whole step: on CUDA the layers are
submitted at once, and show no progress; a busy neighbour made steps on a CPU 12 to 29 times slower."""
TICK_SECONDS = 0.5


class StepTimer:
    """Adds up the ticks since the oldest step began, or since its last sign of life.

    A tick counts as two at most. So the time in which the router itself was stopped does not count as the shards'.
    """

    def __init__(self, floor_seconds: float, cost: CostModel) -> None:
        """Every step may show no sign of life for `floor_seconds`."""
        self._floor_seconds = floor_seconds
        self._cost = cost
        self._step: object = None
        self._seconds = 0.0
        self._pulse: int | None = None
        """The last pulse during the step."""

    @property
    def tick_seconds(self) -> float:
        """Seconds between two ticks."""
        return min(TICK_SECONDS, self._floor_seconds / 4)

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between two calls for the pulse."""
        return min(HEARTBEAT_SECONDS, self._floor_seconds / 4)

    def limit_seconds(self, load: StepLoad) -> float:
        """Return the longest time without a sign of life in a step of this load."""
        predicted = self._cost.seconds(load)
        if predicted is None:
            return self._floor_seconds * max(1.0, load.num_tokens / FIRST_PROMPT_TOKENS)
        return max(self._floor_seconds, SLOWEST * predicted)

    def is_hung(self, step: object, load: StepLoad, seconds: float) -> bool:
        """Return whether `step`, the oldest in flight, hangs; called `seconds` after the last tick."""
        if step is not self._step:
            self._step, self._seconds, self._pulse = step, 0.0, None
            return False
        self._seconds += min(seconds, 2 * self.tick_seconds)
        return self._seconds > self.limit_seconds(load)

    def lasts(self, step: object) -> bool:
        """Return whether `step` was the oldest at the last tick already."""
        return step is self._step

    def is_silent(self, step: object) -> bool:
        """Return whether `step` has shown no sign of life for about as long as a call for the pulse may take.

        A call of a router that was stopped meanwhile proves nothing.
        """
        return step is self._step and self._seconds > self._floor_seconds / 2

    def felt(self, step: object, pulse: int) -> None:
        """Record the pulse that the shards had during `step`: one that changed is a sign of life."""
        if step is not self._step:
            return
        if self._pulse not in (None, pulse):
            self._seconds = 0.0
        self._pulse = pulse
