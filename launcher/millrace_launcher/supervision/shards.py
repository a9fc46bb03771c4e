"""Keeps the shards serving: after a death or a hang the group is killed and restarted while the breaker allows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from millrace_launcher.errors import ShardCannotStart, ShardCrashLoop
from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, first
from millrace_launcher.settings.commands import Commands, ModelFolders
from millrace_launcher.supervision.restarts import Breaker, is_steady
from millrace_launcher.supervision.shard_group import ShardGroup

# Shards that served for this time before they died are no crash loop, even without requests.
STEADY_SECONDS = 60.0
PLANNED = "the shards are restarted as planned"


class Restarting(Protocol):
    """A function that is called before a restart of the shards."""

    def __call__(self, reason: str, *, planned: bool) -> None:
        """`planned` means that an operator restarts them, and no request caused it."""


class Why(IntEnum):
    """Reasons for a restart; the first of several counts."""

    DEATH = 0
    ASKED = 1
    PLANNED = 2


class Shards:
    """The group of shards over all restarts."""

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
        """The number of this start; None unless all ranks serve."""
        return self._lives if self._ready.is_set() and self._group.is_whole else None

    async def ready(self) -> None:
        """Return once all ranks serve."""
        await self._ready.wait()

    async def death(self) -> None:
        """Return once not all ranks serve."""
        if self.life is not None:
            await self._group.death()

    def restart(self, reason: str) -> None:
        """Restart all ranks; without effect while none listens, since a restart is in progress."""
        if self._group.listens and not self._asked.is_set():
            self._asked_reason = reason
            self._asked.set()
        else:
            log.debug("The shards are being restarted already: %s", reason)

    def restart_as_planned(self) -> None:
        """Restart all ranks once they serve; running requests are recomputed."""
        self._planned.set()

    async def run(self, folders: ModelFolders) -> None:
        """Keep them serving. Raises ShardCannotStart or ShardCrashLoop."""
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
        """End all ranks in an orderly way."""
        await self._group.terminate(grace_seconds)

    async def _live(self) -> Why:
        """Wait for the end of this start; return the reason for the restart."""
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
        # Shards that end in an orderly way could accept one more stream from the router and break it without a reason.
        await self._group.kill()

    async def _end_at_once(self, why: Why) -> float:
        """Kill the ranks; return the seconds before the next start, or raise if there is none."""
        was_ready = self._ready_at is not None
        if why is Why.DEATH:
            if is_steady(self._ready_at, self._clock(), enough_seconds=STEADY_SECONDS):
                self.breaker.progressed()
            has_refused = self._group.has_refused
            if not self._have_served and (refusal := self._group.refusal):
                raise ShardCannotStart(refusal)
            reason = self._group.explain_death(was_ready=was_ready)
            if has_refused and not self._have_served:
                raise ShardCannotStart
        else:
            # Shards that hang repeatedly may serve for long in between.
            reason = self._asked_reason
            log.error("The router requests a restart of the shards: %s", reason)
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
