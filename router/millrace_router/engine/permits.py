"""A limit on concurrent generations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace_router.errors import Overloaded


class Permits:
    """Counts the permits for generations; a request without one is refused at once."""

    def __init__(self, total: int, drain_seconds: Callable[[], float]) -> None:
        """`drain_seconds` predicts the seconds after which a refused client may retry."""
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
        """Release `count` permits."""
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
