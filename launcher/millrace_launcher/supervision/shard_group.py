"""The ranks of one model, which start, serve and end together."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from millrace_launcher.host.leftovers import clear_socket
from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, explain, first
from millrace_launcher.processes.process import ManagedProcess
from millrace_launcher.settings.commands import Commands, ModelFolders
from millrace_launcher.supervision.readiness import shard_ready

# Exit codes of Python and argparse: settings, model or memory are not sufficient.
ORDERLY_FAILURES = (1, 2)


class ShardGroup:
    """The processes of all ranks, at most one for each."""

    def __init__(self, commands: Commands, children: Children) -> None:
        self._commands = commands
        self._children = children
        self._ranks: list[ManagedProcess] = []
        self._started = 0.0

    @property
    def is_whole(self) -> bool:
        return len(self._ranks) == self._commands.num_shard and not self._dead()

    @property
    def listens(self) -> bool:
        """Whether the socket of any rank exists, ready or not."""
        return any(path.exists() for path in self._commands.socket_paths())

    async def start(self, folders: ModelFolders) -> None:
        """Start every rank; none may run. Raises ArgumentValidation if another process uses a socket's path."""
        self._started = time.monotonic()
        self._ranks = []
        for path in self._commands.socket_paths():
            clear_socket(path)
        for rank in range(self._commands.num_shard):
            log.info("Starting shard %d", rank)
            command = self._commands.shard(rank, folders.model, folders.draft)
            self._ranks.append(await self._children.start(command))

    async def ready(self) -> None:
        """Return once every rank reports that it serves."""

        async def ready(path: Path) -> None:
            await shard_ready(path)
            log.info("Shard ready in %.3fs", time.monotonic() - self._started)

        await asyncio.gather(*map(ready, self._commands.socket_paths()))

    async def death(self) -> None:
        """Return once a rank has ended."""
        if self.is_whole:
            await first(*(process.wait() for process in self._ranks))

    def explain_death(self, *, was_ready: bool) -> str:
        """Log how dead ranks ended, with the end of their stderr; return a summary in one line."""
        what = "crashed" if was_ready else "failed to start"
        dead = self._dead()
        for process in dead:
            explain(process, f"Shard {self._ranks.index(process)} {what}")
        return ", ".join(f"{process.name}: {process.ending}" for process in dead)

    @property
    def refusal(self) -> str:
        """Why dead ranks cannot start, in their own words, each once; empty if any of them did not say it."""
        dead = self._dead()
        causes = [process.lines.cause for process in dead]
        if not self.has_refused or None in causes:
            return ""
        for process in dead:
            process.lines.drop()
        return "; ".join(dict.fromkeys(filter(None, causes)))

    @property
    def has_refused(self) -> bool:
        """Whether dead ranks reported that they cannot start, and were not killed."""
        codes = [process.exit_code for process in self._dead()]
        return bool(codes) and all(code in ORDERLY_FAILURES for code in codes)

    async def kill(self) -> None:
        """Kill every rank and remove the sockets."""
        for process in self._ranks:
            process.kill()
        await asyncio.gather(*(process.wait() for process in self._ranks))
        for process, path in zip(self._ranks, self._commands.socket_paths(), strict=False):
            path.unlink(missing_ok=True)
            # A rank listens at this path before it publishes its socket.
            path.with_name(f"{path.name}.{process.pid}").unlink(missing_ok=True)

    async def terminate(self, grace_seconds: float) -> None:
        """Send SIGTERM to every rank and wait; remaining ranks are killed after the grace."""
        await asyncio.gather(*(process.terminate(grace_seconds) for process in self._ranks))
        await self.kill()

    def _dead(self) -> list[ManagedProcess]:
        return [process for process in self._ranks if not process.is_running]
