"""A channel to a hash shard whose answers the test releases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace_router.shards.errors import ShardError
from millrace_router.shards.step_result import StepResult
from millrace_testing.router.fake_router import DirectShards
from millrace_testing.shards.hash_shard import HashShard


class HeldShards(DirectShards):
    """Executes steps at once, and delivers one answer for each `release`."""

    def __init__(self, shard: HashShard, *, on_error: Callable[[], None]) -> None:
        """`on_error` is called for a failed step, before the router receives the error."""
        super().__init__(shard)
        self._on_error = on_error
        self._released = asyncio.Semaphore(0)
        self._changed = asyncio.Event()
        self._time_is_up = False

    @property
    def num_held(self) -> int:
        """The number of unread answers."""
        return len(self._answers)

    def release(self) -> None:
        """Deliver one more answer."""
        self._released.release()
        self._changed.set()

    def let_time_pass(self) -> None:
        """End the router's wait for an answer within a time."""
        self._time_is_up = True
        self._changed.set()

    async def open(self) -> None:
        self._released = asyncio.Semaphore(0)
        await super().open()

    async def answers_within(self, seconds: float) -> bool:
        assert seconds > 0.0
        assert self._answers, "nothing is in flight"
        self._time_is_up = False
        while self._released.locked() and not self._time_is_up:
            self._changed.clear()
            await self._changed.wait()
        return not self._released.locked()

    async def receive(self) -> StepResult:
        await self._released.acquire()
        try:
            return await super().receive()
        except ShardError:
            self._on_error()
            raise
