"""One child process: it cannot outlive the launcher, and its output is passed on line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable

from millrace_launcher.logs import error_message, log, relay
from millrace_launcher.settings.commands import Command

HOLD_SECONDS = 1.0
"""Time for a child to end after an error; a longer one is logged before it is known whether the child ends."""


class ChildLines:
    """Logs a child's lines. An error waits for the next line: as the last one, it is the cause of the child's end."""

    def __init__(self, source: str) -> None:
        self.cause: str | None = None
        """The message of the last line, if that is an error."""
        self._source = source
        self._held: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: str) -> None:
        """Log a line, now or with the next one; needs a running event loop."""
        self.release()
        self.cause = error_message(line)
        if self.cause is None:
            relay(line, source=self._source)
            return
        self._held = line
        self._timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self.release)

    def release(self) -> None:
        """Log an error that waits."""
        self.drop()
        if self._held is not None:
            held, self._held = self._held, None
            relay(held, source=self._source)

    def drop(self) -> None:
        """Never report the waiting error: its message is reported elsewhere."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


READ_BYTES = 65536
TAIL_LINES = 50
# A grandchild may hold a pipe open after the child's end; the wait for its lines ends after this time.
DRAIN_SECONDS = 2.0


class ManagedProcess(ABC):
    """A child in its own process group, so that a terminal's Ctrl-C reaches only the launcher.

    It stays in the launcher's session, because Linux may schedule sessions as groups (`sched_autogroup`): a waking
    router would wait for the end of a shard's time slice, and a shard for the router's.
    """

    def __init__(
        self,
        name: str,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
        *,
        takes_line: Callable[[str], bool] | None = None,
        on_error_line: Callable[[str], None],
    ) -> None:
        """A line of stdout is logged unless `takes_line` takes it; lines come without their newline."""
        self.name = name
        self.lines = lines = ChildLines(name)
        self.serves = asyncio.Event()
        """Set once it serves, if it reports that itself."""
        self._exited = asyncio.Event()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

        def heard(line: str) -> None:
            if takes_line is None or not takes_line(line):
                lines.add(line)

        self._pumps = (
            asyncio.create_task(_pump(stdout, heard)),
            asyncio.create_task(_pump(stderr, self._tail.append, on_error_line)),
        )
        self._finished = asyncio.create_task(self._finish())

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Negative for a signal, None while it runs."""

    @abstractmethod
    def _signal(self, number: signal.Signals) -> None: ...

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def ending(self) -> str:
        code = self.exit_code
        if code is None:
            return "still running"
        if code < 0:
            known = -code in list(signal.Signals)
            return f"killed by signal {signal.Signals(-code).name if known else -code}"
        return f"exit code {code}"

    @property
    def stderr_tail(self) -> list[str]:
        """The last lines of its stderr."""
        return list(self._tail)

    async def wait(self) -> int:
        """Wait for its end and its last lines; return the exit code, negative for a signal."""
        return await asyncio.shield(self._finished)

    async def terminate(self, grace_seconds: float) -> None:
        """Send SIGTERM, wait, and kill it after the grace; returns after its end."""
        if self.is_running:
            log.info("Terminating %s", self.name)
            self._signal(signal.SIGTERM)
            log.debug("Waiting for %s to gracefully shutdown", self.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self.wait()
            if self.is_running:
                log.warning("Killing %s, which did not end within %g s", self.name, grace_seconds)
            self.kill()
        await self.wait()
        log.info("%s terminated", self.name)

    def hang_up(self) -> None:
        if self.is_running:
            self._signal(signal.SIGHUP)

    def kill(self) -> None:
        if self.is_running:
            kill_group(self.pid)

    async def _finish(self) -> int:
        await self._exited.wait()
        _, unfinished = await asyncio.wait(self._pumps, timeout=DRAIN_SECONDS)
        for pump in unfinished:
            pump.cancel()
        code = self.exit_code
        assert code is not None
        return code


class SpawnedProcess(ManagedProcess):
    """A process that the launcher has started itself."""

    def __init__(
        self,
        name: str,
        transport: asyncio.SubprocessTransport,
        protocol: _Protocol,
        *,
        takes_line: Callable[[str], bool] | None,
        on_error_line: Callable[[str], None],
    ) -> None:
        assert protocol.stdout is not None
        assert protocol.stderr is not None
        self._transport = transport
        super().__init__(
            name,
            protocol.stdout,
            protocol.stderr,
            takes_line=takes_line,
            on_error_line=on_error_line,
        )
        self._exited = protocol.exited

    @classmethod
    async def start(
        cls,
        command: Command,
        *,
        takes_line: Callable[[str], bool] | None = None,
        on_error_line: Callable[[str], None],
    ) -> SpawnedProcess:
        """Run a command, whose lines are used as in `ManagedProcess`."""
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: _Protocol(loop),
            sys.executable,
            "-m",
            "millrace_launcher.processes.child",
            str(os.getpid()),
            *command.argv,
            env=dict(command.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,
            pass_fds=command.inherited,
        )
        return cls(
            command.name, transport, protocol, takes_line=takes_line, on_error_line=on_error_line
        )

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    @property
    def exit_code(self) -> int | None:
        return self._transport.get_returncode()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._transport.send_signal(number)

    async def _finish(self) -> int:
        code = await super()._finish()
        self._transport.close()
        return code


class _Protocol(asyncio.subprocess.SubprocessStreamProtocol):
    """Reports a child's end at once; asyncio's own `wait` waits until all copies of its pipes are closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(READ_BYTES, loop)
        self.exited = asyncio.Event()
        self._pid = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._pid = transport.get_pid()

    def process_exited(self) -> None:
        """Kill its descendants, then report its end."""
        kill_group(self._pid)
        super().process_exited()
        self.exited.set()


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _pump(stream: asyncio.StreamReader, *receivers: Callable[[str], None]) -> None:
    async for line in lines(stream):
        for receive in receivers:
            receive(line)


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length without newlines; the last needs none. Invalid UTF-8 is replaced."""
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
