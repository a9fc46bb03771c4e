"""Keeps the shards serving: what dies or hangs is killed as a whole and started again, until the breaker says no."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from millrace_launcher.errors import ShardCannotStart, ShardCrashLoop
from millrace_launcher.logs import log
from millrace_launcher.settings.commands import Commands
from millrace_launcher.settings.folders import ModelFolders
from millrace_launcher.supervision.breaker import Breaker, is_steady
from millrace_launcher.supervision.children import Children
from millrace_launcher.supervision.shard_group import ShardGroup
from millrace_launcher.supervision.tasks import first

# Shards that served so long before they died are no crash loop, even if nobody asked them for anything.
STEADY_SECONDS = 60.0
PLANNED = "the shards are restarted as planned"


class Restarting(Protocol):
    """Hears of restarts before the shards are brought down."""

    def __call__(self, reason: str, *, planned: bool) -> None:
        """`planned`: by an operator, so that no request is to blame."""


class Why(IntEnum):
    """Why the shards go down; of several reasons the first counts."""

    DEATH = 0
    ASKED = 1
    PLANNED = 2


class Shards:
    """The one group of shards over all its lives."""

    def __init__(
        self,
        commands: Commands,
        children: Children,
        restarting: Restarting,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.breaker = Breaker(commands.settings.launcher.max_restarts)
        self._group = ShardGroup(commands, children)
        self._restarting = restarting
        self._clock = clock
        self._ready_at: float | None = None
        self._ready = asyncio.Event()
        self._asked = asyncio.Event()
        self._asked_reason = ""
        self._planned = asyncio.Event()
        self._lives = 0
        self._have_served = False

    @property
    def life(self) -> int | None:
        """Which life this is, None while they do not all serve."""
        return self._lives if self._ready.is_set() and self._group.is_whole else None

    async def ready(self) -> None:
        """Return once they serve."""
        await self._ready.wait()

    async def death(self) -> None:
        """Return once they no longer serve; at once if they do not."""
        if self.life is not None:
            await self._group.death()

    def restart(self, reason: str) -> None:
        """Kill them all and start them again. Who asks while none listens means those that are gone already."""
        if self._group.listens and not self._asked.is_set():
            self._asked_reason = reason
            self._asked.set()
        else:
            log.debug("The shards are being restarted already: %s", reason)

    def restart_as_planned(self) -> None:
        """Replace them as soon as they serve; what they compute is computed again."""
        self._planned.set()

    async def run(self, folders: ModelFolders) -> None:
        """Keep them serving for ever; raises ShardCannotStart or ShardCrashLoop."""
        while True:
            self._lives += 1
            self._asked.clear()
            self._ready_at = None
            await self._group.start(folders)
            why = await self._live()
            self._ready.clear()
            if why is Why.PLANNED:
                await self._end_as_planned()
            else:
                await asyncio.sleep(await self._end_at_once(why))

    async def terminate(self, grace_seconds: float) -> None:
        """End them in order."""
        await self._group.terminate(grace_seconds)

    async def _live(self) -> Why:
        """From start to end; returns why they have to go down, if they have not already."""
        group = self._group
        place = await first(group.death(), self._asked.wait(), group.ready())
        if place < Why.PLANNED:
            return Why(place)
        self._ready.set()
        self._ready_at = self._clock()
        if self._have_served:
            log.info("The shards are back")
        self._have_served = True
        return Why(await first(group.death(), self._asked.wait(), self._planned.wait()))

    async def _end_as_planned(self) -> None:
        self._planned.clear()
        log.info("Restarting the shards as planned")
        self._restarting(PLANNED, planned=True)
        # Shards that end in order might take one more stream from the router, and break it: a failure without a reason.
        await self._group.kill()

    async def _end_at_once(self, why: Why) -> float:
        """Seconds to wait before the next start; raises when there is none."""
        was_ready = self._ready_at is not None
        if why is Why.DEATH:
            if is_steady(self._ready_at, self._clock(), enough_seconds=STEADY_SECONDS):
                self.breaker.progressed()
            has_refused = self._group.has_refused
            reason = self._group.explain_death(was_ready=was_ready)
            if has_refused and not self._have_served:
                raise ShardCannotStart
        else:
            # Shards that hang again and again may well be up for long in between.
            reason = self._asked_reason
            log.error("The router asks for a restart of the shards: %s", reason)
        self._restarting(reason, planned=False)
        await self._group.kill()
        delay = self.breaker.restart(was_ready=was_ready)
        if delay is None:
            if why is Why.ASKED:
                self._group.explain_death(was_ready=was_ready)
            count = self.breaker.restarts + self.breaker.searches
            raise ShardCrashLoop(f"{reason}; {count} restarts without progress (--max-restarts)")
        log.warning("Restarting the shards%s", f" in {delay:g} s" if delay else "")
        return delay
