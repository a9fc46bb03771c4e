"""Starts the launcher's children: their lines go to its log, and the guard knows of each that lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from millrace_launcher.logs import log, relay
from millrace_launcher.settings.commands import Command
from millrace_launcher.settings.openmp import remove_registration
from millrace_launcher.supervision.guard import DONE, GONE
from millrace_launcher.supervision.process import ManagedProcess

GUARD_SECONDS = 12.0


class Children:
    """What was started and has not ended."""

    def __init__(self) -> None:
        self._alive: dict[ManagedProcess, asyncio.Task[None]] = {}
        self._guard: asyncio.subprocess.Process | None = None

    async def guard(self, command: Command) -> None:
        """From now on no child outlives the launcher, however that ends."""
        self._guard = await asyncio.create_subprocess_exec(
            *command.argv,
            env=dict(command.environment),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def start(
        self, command: Command, on_line: Callable[[str], None] | None = None
    ) -> ManagedProcess:
        """Run a command; lines of its stdout are logged unless they are handed over."""
        process = await ManagedProcess.start(
            command,
            on_line=on_line or (lambda line: relay(line, source=command.name)),
            # Stderr is shown in full only on death; until then it is for those who debug.
            on_error_line=lambda line: relay(line, source=command.name, plain_level=logging.DEBUG),
        )
        self._tell_guard(str(process.pid))
        self._alive[process] = asyncio.create_task(self._see_off(process))
        return process

    def kill(self) -> None:
        """End all of them at once."""
        for process in self._alive:
            process.kill()

    async def dismiss_guard(self) -> None:
        """Once every child has ended: the guard has the sockets left to remove."""
        await asyncio.gather(*self._alive.values())
        if self._guard is None:
            return
        self._tell_guard(DONE)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GUARD_SECONDS):
                await self._guard.wait()

    async def _see_off(self, process: ManagedProcess) -> None:
        await process.wait()
        remove_registration(process.pid)
        self._tell_guard(f"{GONE}{process.pid}")
        del self._alive[process]

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{line}\n".encode())


def explain(process: ManagedProcess, what: str) -> None:
    """Say how a child ended, with the last lines of its stderr."""
    log.error("%s (%s)", what, process.ending)
    if process.stderr_tail:
        log.error(
            "%s complete standard error output:\n%s", process.name, "\n".join(process.stderr_tail)
        )
