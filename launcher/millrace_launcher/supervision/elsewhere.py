"""Ranks on other hosts: those that others run and restart, and those that a cluster places."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from millrace_launcher.errors import ShardCannotStart, ShardCrashLoop
from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, explain
from millrace_launcher.processes.process import ManagedProcess
from millrace_launcher.settings.commands import Commands, ModelFolders, Placed
from millrace_launcher.supervision.restarts import Breaker


class RemoteShards:
    """Has the methods of `Shards`, and starts nothing: the router waits for the ranks, and ends them over the wire."""

    life = 1

    def __init__(self, max_restarts: int) -> None:
        self.breaker = Breaker(max_restarts)

    async def started(self) -> None:
        """The router may start."""
        await self.ready()

    async def ready(self) -> None:
        """The router may connect: it waits for the ranks itself."""

    async def death(self) -> None:
        """Their deaths are not seen from here."""
        await asyncio.Event().wait()

    def restart(self, reason: str) -> None:
        """The router ends them itself."""
        log.debug("The router has the shards restarted: %s", reason)

    def restart_as_planned(self) -> None:
        """Whoever runs them restarts them."""
        log.warning("The shards run elsewhere; restart them there")

    async def run(self, folders: ModelFolders) -> None:
        del folders
        await asyncio.Event().wait()

    async def terminate(self, grace_seconds: float) -> None:
        """They stay for the next router."""
        del grace_seconds


KEY = "cluster"
"""Marks the lines that say where the shards are."""
GRACE_SECONDS = 10.0


class ClusterShards(RemoteShards):
    """Has a cluster place the ranks. The router ends hanging ranks itself; a cluster that ends takes them with it."""

    def __init__(
        self, commands: Commands, children: Children, moved: Callable[[Placed], None]
    ) -> None:
        """`moved` receives the shards' addresses whenever they change."""
        super().__init__(commands.settings.launcher.max_restarts)
        self.placed: Placed | None = None
        self._commands = commands
        self._children = children
        self._moved = moved
        self._ready = asyncio.Event()
        self._process: ManagedProcess | None = None

    async def ready(self) -> None:
        """Return once all shards are placed; the router waits for them to load."""
        await self._ready.wait()

    def restart_as_planned(self) -> None:
        """Not offered: the ranks' own supervisors are on other hosts."""
        log.warning("SIGHUP does not restart shards on other hosts")

    async def run(self, folders: ModelFolders) -> None:
        """Keep them placed. Raises ShardCannotStart or ShardCrashLoop."""
        with tempfile.TemporaryDirectory(prefix="millrace-cluster-") as certificates:
            while True:
                log.info("Starting %d shard(s) on a cluster", self._commands.num_shard)
                command = self._commands.cluster(folders.model, folders.draft, Path(certificates))
                self._process = await self._children.start(command, self._takes_line)
                await self._process.wait()
                await asyncio.sleep(self._ended(self._process))

    async def terminate(self, grace_seconds: float) -> None:
        """Have the cluster end them."""
        if self._process is not None:
            await self._process.terminate(min(grace_seconds, GRACE_SECONDS))

    def _takes_line(self, line: str) -> bool:
        try:
            placement = json.loads(line)[KEY]
            files = (Path(placement[name]) for name in ("cert", "key", "ca"))
            self.placed = Placed(tuple(placement["addresses"]), *files)
        except (ValueError, KeyError, TypeError):
            return False
        log.info("The shards are at %s", ", ".join(self.placed.addresses))
        if self._ready.is_set():
            self._moved(self.placed)
        self._ready.set()
        return True

    def _ended(self, process: ManagedProcess) -> float:
        """The seconds before the next start; raises if there is none."""
        cause = process.lines.cause
        if not self._ready.is_set() and cause is not None:
            process.lines.drop()
            raise ShardCannotStart(cause)
        explain(process, "The cluster's shards ended")
        delay = self.breaker.restart()
        if delay is None:
            count = self.breaker.restarts
            raise ShardCrashLoop(
                f"the cluster ended {count} times without progress (--max-restarts)"
            )
        return delay
