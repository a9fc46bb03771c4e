"""Starts the launcher's children, relays their output to the log, and reports them to the guard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from millrace_launcher.host.leftovers import remove_registration
from millrace_launcher.logs import log, relay
from millrace_launcher.processes.guard import DONE, GONE
from millrace_launcher.processes.process import ManagedProcess, SpawnedProcess
from millrace_launcher.settings.commands import Command


async def first(*coroutines: Coroutine[Any, Any, Any]) -> int:
    """Run all until one ends, cancel the others, and return its index. Its exception is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        place = next(place for place, task in enumerate(tasks) if task.done())
        tasks[place].result()
        return place
    finally:
        await cancel(tasks)


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait; their exceptions are ignored."""
    found = list(tasks)
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)


GUARD_SECONDS = 12.0


class Children:
    """The running children."""

    def __init__(self) -> None:
        self._alive: dict[ManagedProcess, asyncio.Task[None]] = {}
        self._guard: asyncio.subprocess.Process | None = None

    async def guard(self, command: Command) -> None:
        """Start the guard; from then on no child outlives the launcher, however it ends."""
        self._guard = await asyncio.create_subprocess_exec(
            *command.argv,
            env=dict(command.environment),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def start(
        self, command: Command, takes_line: Callable[[str], bool] | None = None
    ) -> ManagedProcess:
        """Run a command; its stdout is logged, except lines that `takes_line` takes."""
        process = await SpawnedProcess.start(
            command, takes_line=takes_line, on_error_line=error_log(command.name)
        )
        self.adopt(process)
        return process

    def adopt(self, process: ManagedProcess) -> None:
        """Let the guard kill `process` with the others, and wait for its end before the guard is dismissed."""
        self._notify_guard(str(process.pid))
        self._alive[process] = asyncio.create_task(self._watch(process))

    def kill(self) -> None:
        for process in self._alive:
            process.kill()

    async def dismiss_guard(self) -> None:
        """Wait for the end of all children, then let the guard remove the sockets and end."""
        await asyncio.gather(*self._alive.values())
        if self._guard is None:
            return
        self._notify_guard(DONE)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GUARD_SECONDS):
                await self._guard.wait()

    async def _watch(self, process: ManagedProcess) -> None:
        pid = process.pid
        await process.wait()
        remove_registration(pid)
        self._notify_guard(f"{GONE}{pid}")
        del self._alive[process]

    def _notify_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{line}\n".encode())


def error_log(name: str) -> Callable[[str], None]:
    """Logs lines of stderr at debug level; after the child's death they are logged in full."""
    return lambda line: relay(line, source=name, plain_level=logging.DEBUG)


def explain(process: ManagedProcess, what: str) -> None:
    """Log how a child ended: with its own words, or with the last lines of its stderr."""
    process.lines.drop()
    if process.lines.cause is not None:
        log.error("%s (%s): %s", what, process.ending, process.lines.cause)
        return
    log.error("%s (%s)", what, process.ending)
    if process.stderr_tail:
        log.error(
            "%s complete standard error output:\n%s", process.name, "\n".join(process.stderr_tail)
        )
