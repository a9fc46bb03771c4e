"""Looks after the shards from outside the scheduling loop: whether a step hangs, and whether they are there at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from millrace_router.shard_stream import ShardError, ShardHung
from millrace_router.step_load import StepLoad
from millrace_router.watchdog import Watchdog

HEARTBEAT_SECONDS = 1.0
"""How often idle shards are asked whether they are there."""


class Oldest(NamedTuple):
    """The oldest step in flight."""

    number: int
    step: object
    load: StepLoad


class Sentry:
    """Watches for ever, and reports to `alarm` what it finds."""

    def __init__(
        self,
        watchdog: Watchdog,
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
