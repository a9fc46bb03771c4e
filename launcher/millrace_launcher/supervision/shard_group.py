"""The ranks of one model, which start, serve and end together."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

from millrace_launcher.host.leftovers import clear_socket
from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, explain, first
from millrace_launcher.processes.fork_server import ShardStarts
from millrace_launcher.processes.process import ManagedProcess
from millrace_launcher.settings.commands import Commands, ModelFolders
from millrace_launcher.supervision.readiness import shard_ready
from millrace_launcher.supervision.trust import START_AGAIN, available_bytes

# Exit codes of Python and argparse: settings, model or memory are not sufficient.
ORDERLY_FAILURES = (1, 2)
CAUSE_SECONDS = 2.0
"""The end of a process that was killed is reported within milliseconds, unless it leaves a large core file."""
SECOND_MODEL = 1.1
"""Memory that a second model needs, as a multiple of what the first one takes."""


class ShardGroup:
    """The processes of all ranks, at most one for each."""

    def __init__(self, commands: Commands, children: Children) -> None:
        self._commands = commands
        self._ranks: list[ManagedProcess] = []
        self._starts = [
            ShardStarts(children, commands.settings.launcher.fork_server)
            for _ in range(commands.num_shard)
        ]
        self._started = 0.0

    @property
    def is_whole(self) -> bool:
        return len(self._ranks) == self._commands.num_shard and not self._dead()

    @property
    def listens(self) -> bool:
        """Whether the socket of any rank exists, ready or not."""
        return any(path.exists() for path in self._commands.socket_paths())

    async def start(self, folders: ModelFolders, *, keep_kv: bool = False) -> None:
        """Start every rank; none may run. With `keep_kv` forks go on with the KV of those before.

        Raises ArgumentValidation if another process uses a socket's path.
        """
        self._started = time.monotonic()
        self._ranks = []
        for path in self._commands.socket_paths():
            clear_socket(path)
        for rank, starts in enumerate(self._starts):
            log.info("Starting shard %d", rank)
            command_of = partial(self._commands.shard, rank, folders.model, folders.draft)
            self._ranks.append(await starts.start(command_of, keep_kv=keep_kv))

    async def ready(self) -> None:
        """Return once every rank reports that it serves."""

        async def ready(process: ManagedProcess, path: Path) -> None:
            await first(process.serves.wait(), shard_ready(path))
            log.info("Shard ready in %.3fs", time.monotonic() - self._started)

        await asyncio.gather(*map(ready, self._ranks, self._commands.socket_paths()))

    async def death(self) -> None:
        """Return once a rank has ended, and the one without which it ended, if that is why, within CAUSE_SECONDS."""
        if self.is_whole:
            await first(*(process.wait() for process in self._ranks))
        if set(self.exit_codes) == {START_AGAIN}:
            living = [process.wait() for process in self._ranks if process.is_running]
            if living:
                await first(*living, asyncio.sleep(CAUSE_SECONDS))

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
        codes = self.exit_codes
        return bool(codes) and all(code in ORDERLY_FAILURES for code in codes)

    @property
    def exit_codes(self) -> list[int]:
        """Those of the dead ranks, negative for signals."""
        return [process.exit_code for process in self._dead() if process.exit_code is not None]

    async def kill(self) -> None:
        """Kill every rank and remove the sockets."""
        for process in self._ranks:
            process.kill()
        await asyncio.gather(*(process.wait() for process in self._ranks))
        for process, path in zip(self._ranks, self._commands.socket_paths(), strict=False):
            path.unlink(missing_ok=True)
            # A rank listens at this path before it publishes its socket.
            path.with_name(f"{path.name}.{process.pid}").unlink(missing_ok=True)

    @property
    def obstacle(self) -> str | None:
        """Why the model of every rank cannot be loaded a second time while the ranks serve; None: it may be."""
        sizes = [starts.loaded_bytes for starts in self._starts]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return "they are no forks of a loaded model"
        needed, available = int(sum(known) * SECOND_MODEL), available_bytes()
        if available is not None and available < needed:
            return f"memory has {available >> 20} MiB, and it needs about {needed >> 20}"
        return None

    async def load_anew(self, folders: ModelFolders) -> bool:
        """Load the model of every rank a second time; return whether `swap` may let the next ranks be forks of it."""
        loading = (
            starts.load_anew(partial(self._commands.shard, rank, folders.model, folders.draft))
            for rank, starts in enumerate(self._starts)
        )
        return all(await asyncio.gather(*loading))

    async def swap(self) -> None:
        """Let the next ranks be forks of the models that `load_anew` has loaded; no rank runs."""
        await asyncio.gather(*(starts.swap() for starts in self._starts))

    async def give_up_anew(self) -> None:
        """Drop what `load_anew` has loaded."""
        await asyncio.gather(*(starts.give_up_anew() for starts in self._starts))

    async def go_cold(self) -> None:
        """Drop the loaded models, so that the next ranks load them anew; no rank runs."""
        await asyncio.gather(*(starts.go_cold() for starts in self._starts))

    async def terminate(self, grace_seconds: float) -> None:
        """Send SIGTERM to every rank and wait; remaining ranks are killed after the grace."""
        await asyncio.gather(*(process.terminate(grace_seconds) for process in self._ranks))
        await self.kill()
        await self.go_cold()

    def _dead(self) -> list[ManagedProcess]:
        return [process for process in self._ranks if not process.is_running]
