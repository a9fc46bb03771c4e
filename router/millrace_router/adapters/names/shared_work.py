"""Work that several requests wait for, done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SharedWork(Generic[Key, Result]):
    """Runs a piece of work once for all who ask for the same key meanwhile; it outlives those that leave."""

    def __init__(self) -> None:
        self._running: dict[Key, asyncio.Future[Result]] = {}

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, key: Key, work: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of the work for `key`, or raise its error."""
        task = self._running.get(key)
        if task is None:
            task = asyncio.ensure_future(work())
            self._running[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    def _ended(self, key: Key, task: asyncio.Future[Result]) -> None:
        del self._running[key]
        if not task.cancelled():
            # Nobody may be left to see it.
            task.exception()
