"""Keeps some ranks of a model running, for a router elsewhere: `millrace-launcher shards`."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from millrace_launcher.errors import ShardCannotStart, ShardCrashLoop
from millrace_launcher.host.claims import claimed_address
from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, cancel, explain, first
from millrace_launcher.processes.fork_server import ShardStarts
from millrace_launcher.processes.process import ManagedProcess
from millrace_launcher.settings.checks import split_address
from millrace_launcher.settings.commands import Commands, ModelFolders
from millrace_launcher.supervision.download import resolve_model
from millrace_launcher.supervision.readiness import address_ready
from millrace_launcher.supervision.restarts import Breaker, Stop, is_steady
from millrace_launcher.supervision.shard_group import ORDERLY_FAILURES
from millrace_launcher.supervision.trust import NOTHING, START_AGAIN, Distrust

AGAIN_SECONDS = 1.0
"""Pause before a rank meets the others anew, if it was not ready."""
STEADY_SECONDS = 60.0
GRACE_SECONDS = 10.0


class RankHost:
    """Ranks that start and end each by itself; the router and the ranks see to it that they meet."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._children = Children()
        self._ranks = [
            _Rank(commands, self._children, commands.first_rank + place)
            for place in range(commands.num_shard)
        ]
        self._stop = Stop(self._children)

    async def run(self) -> None:
        """Run until a signal. Raises LaunchError for any other end."""
        self._stop.listen()
        try:
            await first(self._serve(), self._stop.wait())
        finally:
            await asyncio.gather(*(rank.terminate() for rank in self._ranks))
            await self._children.dismiss_guard()

    async def _serve(self) -> None:
        for address in self._commands.addresses:
            claimed_address(*split_address(address, "address"), "--address").close()
        folders = await resolve_model(self._commands, self._children)
        await self._children.guard(self._commands.guard())
        # The first one that cannot go on ends all.
        await first(*(rank.run(folders) for rank in self._ranks))


class _Rank:
    """The process of a rank over all restarts."""

    def __init__(self, commands: Commands, children: Children, rank: int) -> None:
        self._commands = commands
        self._starts = ShardStarts(children, commands.settings.launcher.fork_server)
        self._rank = rank
        self._address = commands.addresses[rank - commands.first_rank]
        self._breaker = Breaker(commands.settings.launcher.max_restarts)
        self._distrust = Distrust()
        self._process: ManagedProcess | None = None
        self._ready_at: float | None = None
        self._has_served = False

    async def run(self, folders: ModelFolders) -> None:
        """Keep it running. Raises ShardCannotStart or ShardCrashLoop."""
        kept = NOTHING
        while True:
            self._ready_at = None
            log.info("Starting shard %d", self._rank)
            command_of = partial(self._commands.shard, self._rank, folders.model, folders.draft)
            process = self._process = await self._starts.start(command_of, keep_kv=kept.kv)
            ready = asyncio.create_task(self._ready())
            try:
                code = await process.wait()
            finally:
                await cancel([ready])
            delay = self._ended(process)
            kept = self._distrust.after([code], restarts=self._breaker.restarts)
            if not kept.weights:
                await self._starts.go_cold()
            await asyncio.sleep(delay)

    async def terminate(self) -> None:
        """End it in an orderly way."""
        if self._process is not None:
            await self._process.terminate(GRACE_SECONDS)
        await self._starts.go_cold()

    async def _ready(self) -> None:
        started = time.monotonic()
        assert self._process is not None
        await first(self._process.serves.wait(), address_ready(self._address))
        self._ready_at = time.monotonic()
        self._has_served = True
        self._distrust.ready()
        log.info("Shard %d ready in %.3fs", self._rank, self._ready_at - started)

    def _ended(self, process: ManagedProcess) -> float:
        """The seconds before the next start; raises if there is none."""
        was_ready = self._ready_at is not None
        if is_steady(self._ready_at, time.monotonic(), enough_seconds=STEADY_SECONDS):
            self._breaker.progressed()
        if process.exit_code == START_AGAIN:
            log.warning("Shard %d meets the others anew", self._rank)
            return 0.0 if was_ready else AGAIN_SECONDS
        if not self._has_served and process.exit_code in ORDERLY_FAILURES and process.lines.cause:
            process.lines.drop()
            raise ShardCannotStart(process.lines.cause)
        explain(process, f"Shard {self._rank} {'crashed' if was_ready else 'failed to start'}")
        delay = self._breaker.restart(was_ready=was_ready)
        if delay is None:
            restarts = self._breaker.restarts
            raise ShardCrashLoop(
                f"shard {self._rank}: {process.ending}; {restarts} restarts without progress (--max-restarts)"
            )
        log.warning("Restarting shard %d%s", self._rank, f" in {delay:g} s" if delay else "")
        return delay
