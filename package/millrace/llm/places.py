"""The requests that may be in flight, shared by all calls of a model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Places:
    """Gives places in the order in which they are asked for."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = count
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def taken(self, wanted: int) -> AsyncGenerator[None, None]:
        """Hold `wanted` places at once, or all there are if that is less."""
        wanted = max(1, min(wanted, self._count))
        await self._take(wanted)
        try:
            yield
        finally:
            self._give(wanted)

    async def _take(self, wanted: int) -> None:
        if not self._waiting and self._free >= wanted:
            self._free -= wanted
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((place, wanted))
        try:
            await place
        except asyncio.CancelledError:
            # The places may have been given at the same moment, and others may fit where this one waited.
            self._give(0 if place.cancelled() else wanted)
            raise

    def _give(self, count: int) -> None:
        self._free += count
        while self._waiting:
            place, wanted = self._waiting[0]
            if not place.cancelled():
                if wanted > self._free:
                    return
                self._free -= wanted
                place.set_result(None)
            self._waiting.popleft()
