"""One child process: started so that it cannot outlive the launcher, its lines relayed, its end explained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from millrace_launcher.logs import log

READ_BYTES = 65536
TAIL_LINES = 50
# A grandchild may hold a pipe open after the child is gone; its lines are waited for this long.
DRAIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: a program by absolute path with arguments, and its whole environment."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]


class ManagedProcess:
    """A child in a session of its own, so that a terminal's Ctrl-C reaches the launcher alone."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        *,
        on_line: Callable[[str], None],
        on_error_line: Callable[[str], None],
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        assert process.stdout is not None
        assert process.stderr is not None
        self._pumps = (
            asyncio.create_task(_pump(process.stdout, on_line)),
            asyncio.create_task(_pump(process.stderr, self._tail.append, on_error_line)),
        )
        self._finished = asyncio.create_task(self._finish())

    @classmethod
    async def start(
        cls,
        command: Command,
        *,
        on_line: Callable[[str], None],
        on_error_line: Callable[[str], None],
    ) -> ManagedProcess:
        """Run a command; each line of its stdout and stderr is handed over without its newline."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "millrace_launcher.child",
            str(os.getpid()),
            *command.argv,
            env=dict(command.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(command.name, process, on_line=on_line, on_error_line=on_error_line)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        if code is None:
            return "still running"
        if code < 0:
            return f"killed by signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    @property
    def stderr_tail(self) -> list[str]:
        """The last lines of its stderr."""
        return list(self._tail)

    async def wait(self) -> int:
        """Until it has ended and its lines are relayed: the exit code, negative for a signal."""
        return await asyncio.shield(self._finished)

    async def terminate(self, grace_seconds: float) -> None:
        """Ask it to end, wait, kill it when the grace is over; returns when it is gone."""
        if self.is_running:
            log.info("Terminating %s", self.name)
            self._signal(signal.SIGTERM)
            log.info("Waiting for %s to gracefully shutdown", self.name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), grace_seconds)
            if self.is_running:
                log.warning("Killing %s, which did not end within %g s", self.name, grace_seconds)
        # Whatever it started goes with it.
        self.kill()
        await self.wait()
        log.info("%s terminated", self.name)

    def kill(self) -> None:
        """End it and its descendants at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _finish(self) -> int:
        code = await self._process.wait()
        _, unfinished = await asyncio.wait(self._pumps, timeout=DRAIN_SECONDS)
        for pump in unfinished:
            pump.cancel()
        return code


async def _pump(stream: asyncio.StreamReader, *receivers: Callable[[str], None]) -> None:
    async for line in lines(stream):
        for receive in receivers:
            receive(line)


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length, without their newlines; the last one needs none. Broken UTF-8 is replaced."""
    parts: list[bytes] = []
    while chunk := await stream.read(READ_BYTES):
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            parts.append(piece)
            yield b"".join(parts).decode(errors="replace").rstrip("\r")
            parts.clear()
        if rest:
            parts.append(rest)
    if parts:
        yield b"".join(parts).decode(errors="replace").rstrip("\r")
