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
from millrace_launcher.supervision.trust import NOTHING, START_AGAIN, Distrust

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
        serving: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.breaker = Breaker(commands.settings.launcher.max_restarts)
        self._group = ShardGroup(commands, children)
        self._distrust = Distrust()
        self._kept = NOTHING
        """The parts that the next start uses again."""
        self._restarting = restarting
        self._serving = serving
        self._clock = clock
        self._ready_at: float | None = None
        self._started, self._ready = asyncio.Event(), asyncio.Event()
        self._asked = asyncio.Event()
        self._asked_reason = ""
        self._planned = asyncio.Event()
        self._has_second = False
        """Whether another loaded model waits for a planned restart."""
        self._lives = 0
        self._have_served = False

    @property
    def life(self) -> int | None:
        """The number of this start; None unless all ranks load or serve."""
        return self._lives if self._started.is_set() and self._group.is_whole else None

    async def started(self) -> None:
        """Return once all ranks load."""
        await self._started.wait()

    async def ready(self) -> None:
        """Return once all ranks serve."""
        await self._ready.wait()

    async def death(self) -> None:
        """Return once not all ranks serve."""
        if self.life is not None:
            await self._group.death()

    def restart(self, reason: str) -> None:
        """Restart all ranks; without effect while none serves or listens, since a restart is in progress.

        Ranks whose sockets were removed serve and do not listen.
        """
        if (self._ready.is_set() or self._group.listens) and not self._asked.is_set():
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
            await self._group.start(folders, keep_kv=self._kept.kv)
            self._started.set()
            why = await self._live(folders)
            self._started.clear()
            self._ready.clear()
            if why is Why.PLANNED:
                await self._end_as_planned()
            else:
                await asyncio.sleep(await self._end_at_once(why))

    async def terminate(self, grace_seconds: float) -> None:
        """End all ranks in an orderly way."""
        await self._group.terminate(grace_seconds)

    async def _live(self, folders: ModelFolders) -> Why:
        """Wait for the end of this start; return the reason for the restart."""
        group = self._group
        place = await first(group.death(), self._asked.wait(), group.ready())
        if place < Why.PLANNED:
            return Why(place)
        self._ready.set()
        self._ready_at = self._clock()
        self._distrust.ready()
        if self._have_served:
            log.info("The shards are back")
            self._serving()
        self._have_served = True
        while True:
            why = Why(await first(group.death(), self._asked.wait(), self._planned.wait()))
            if why is not Why.PLANNED:
                return why
            if (reason := await self._load_anew(folders)) is not None:
                return reason

    async def _load_anew(self, folders: ModelFolders) -> Why | None:
        """Load the model a second time before a planned restart, if that can be; return the reason for the restart.

        None if the model cannot be loaded any more, so that the shards stay. Shards that die meanwhile are restarted
        at once, and again as planned.
        """
        group, why = self._group, Why.PLANNED
        self._has_second = False
        if (obstacle := group.obstacle) is not None:
            log.info("The shards end before the model is loaded again: %s", obstacle)
            return why
        log.info("Loading the model a second time, for a planned restart")
        loaded = list[bool]()

        async def load() -> None:
            loaded.append(await group.load_anew(folders))

        why = Why(await first(group.death(), self._asked.wait(), load()))
        self._has_second = why is Why.PLANNED and loaded == [True]
        if self._has_second:
            return why
        await group.give_up_anew()
        if why is not Why.PLANNED:
            return why
        self._planned.clear()
        log.error("The model cannot be loaded again, and the shards stay as they are")
        return None

    async def _end_as_planned(self) -> None:
        self._planned.clear()
        log.info("Restarting the shards as planned")
        self._restarting(PLANNED, planned=True)
        # Shards that end in an orderly way could accept one more stream from the router and break it without a reason.
        await self._group.kill()
        # An operator may have new code or weights.
        self._kept = NOTHING
        if self._has_second:
            await self._group.swap()
        else:
            await self._group.go_cold()

    async def _end_at_once(self, why: Why) -> float:
        """Kill the ranks; return the seconds before the next start, or raise if there is none."""
        was_ready = self._ready_at is not None
        codes = self._group.exit_codes if why is Why.DEATH else []
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
        if set(codes) == {START_AGAIN}:
            # The rank that is gone has ended in a way that is not known.
            codes = []
        self._kept = self._distrust.after(
            codes, restarts=self.breaker.restarts, searches=self.breaker.searches
        )
        if not self._kept.weights:
            await self._group.go_cold()
        log.warning("Restarting the shards%s", f" in {delay:g} s" if delay else "")
        return delay
