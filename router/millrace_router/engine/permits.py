"""A limit to the generations that run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace_router.errors import Overloaded


class Permits:
    """Counts the permits for generations; a request without one is refused at once."""

    def __init__(self, total: int, drain_seconds: Callable[[], float]) -> None:
        """`drain_seconds` predicts when a refused client may try again."""
        self.free = total
        self._total = total
        self._drain_seconds = drain_seconds
        self._all_free = asyncio.Event()
        self._all_free.set()

    def take(self, count: int = 1) -> None:
        """Take `count` permits, or none and raise Overloaded."""
        if self.free < count:
            raise Overloaded(retry_after_seconds=self._drain_seconds())
        self.free -= count
        self._all_free.clear()

    def give(self, count: int = 1) -> None:
        """Give `count` permits back."""
        self.free += count
        assert self.free <= self._total
        if self.free == self._total:
            self._all_free.set()

    @property
    def taken(self) -> int:
        """Number of permits taken."""
        return self._total - self.free

    async def all_free(self) -> None:
        """Wait until no permit is taken."""
        await self._all_free.wait()
