"""A client of a hash shard whose answers come when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace_fakes_router import DirectShards
from millrace_hash_shard import HashShard
from millrace_router.shard_client import ShardError
from millrace_router.wire import StepResult


class HeldShards(DirectShards):
    """Executes steps at once, and gives out an answer for each `release`."""

    def __init__(self, shard: HashShard, *, on_error: Callable[[], None]) -> None:
        """`on_error` is told of a failed step right before the router is."""
        super().__init__(shard)
        self._on_error = on_error
        self._released = asyncio.Semaphore(0)

    @property
    def num_held(self) -> int:
        """Answers nobody has read."""
        return len(self._answers)

    def release(self) -> None:
        """Let the router read one more answer."""
        self._released.release()

    async def open(self) -> None:
        self._released = asyncio.Semaphore(0)
        await super().open()

    async def receive(self) -> StepResult:
        await self._released.acquire()
        try:
            return await super().receive()
        except ShardError:
            self._on_error()
            raise
