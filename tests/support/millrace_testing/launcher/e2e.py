"""Starts the real launcher on a port of its own and talks to it over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import psutil
from bench.faults.members import role_of

from millrace_testing.launcher.deployment import kept_port

ROOT = Path(__file__).resolve().parents[4]
READY_SECONDS = 180
END_SECONDS = 120
ASK_SECONDS = 60
POLL_SECONDS = 0.02

Found = TypeVar("Found")


@dataclass
class Program:
    """A running program, and what it prints."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)


@contextmanager
def start(*argv: str) -> Iterator[Program]:
    """Python with `argv`; killed at the end if it has not ended by itself."""
    program = Program(_start(argv, {}))

    def pump() -> None:
        assert program.process.stdout is not None
        program.lines.extend(line.rstrip("\n") for line in program.process.stdout)

    thread = Thread(target=pump, daemon=True)
    thread.start()
    try:
        yield program
    finally:
        _end(program.process)
        thread.join(END_SECONDS)
        if program.process.stdout is not None:
            program.process.stdout.close()


@dataclass
class Server:
    """A running launcher."""

    process: subprocess.Popen[str]
    port: int
    sockets: Path
    lines: list[str] = field(default_factory=list)
    is_silent: Event = field(default_factory=Event)
    """Set once all processes of the launcher have closed their output."""

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def find(self, role: str) -> psutil.Process | None:
        """The running child of that role."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                its_role = role_of(child.cmdline(), child.name())
                if its_role == role and child.status() != psutil.STATUS_ZOMBIE:
                    return child
            except psutil.NoSuchProcess:
                continue
        return None

    @property
    def shard(self) -> psutil.Process:
        """The shard of rank 0."""
        found = self.find("shard-0")
        assert found is not None, self.log
        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the shard during the block."""
        stopped = self.shard
        stopped.suspend()
        try:
            yield
        finally:
            stopped.resume()

    async def caught(
        self,
        send: Callable[[], Coroutine[Any, Any, Found]],
        *,
        is_time: Callable[[], bool],
        num_running: int,
    ) -> tuple[asyncio.Task[Found], psutil.Process]:
        """Start `send`, and stop the shard while `num_running` requests run after `is_time()`; return both.

        If fewer requests are left by then on a busy machine, all are sent again.
        """
        while True:
            task = asyncio.create_task(send())
            while not (task.done() or is_time()):
                await asyncio.sleep(POLL_SECONDS)
            shard = self.shard
            shard.suspend()
            if self.metrics()["millrace_requests_running"] >= num_running:
                return task, shard
            shard.resume()
            await task

    def end(self) -> int:
        """Send SIGTERM and return the exit code; the log is complete then."""
        self.process.terminate()
        code = self.process.wait(END_SECONDS)
        assert self.is_silent.wait(END_SECONDS)
        return code

    def metrics(self) -> dict[str, float]:
        """Value by series, as /metrics names it."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=ASK_SECONDS)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        lines = (line for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def until(condition: Callable[[], Found]) -> Found:
    """Poll until `condition()` holds and return its value; the test's deadline bounds it."""
    while not (found := condition()):
        await asyncio.sleep(POLL_SECONDS)
    return found


def wait_for(condition: Callable[[], Found], *, seconds: float = END_SECONDS) -> Found:
    """`until` for tests that are no coroutines, and have no deadline."""
    return asyncio.run(_within(seconds, until(condition)))


async def _within(seconds: float, work: Awaitable[Found]) -> Found:
    async with asyncio.timeout(seconds):
        return await work


LAUNCHER = ("-m", "millrace_launcher")


@contextmanager
def launch(
    *args: str,
    env: dict[str, str] | None = None,
    launcher: Sequence[str] = LAUNCHER,
    meanwhile: Callable[[Server], None] | None = None,
) -> Iterator[Server]:
    """The launcher with `args`, ready to serve; killed at the end if it has not ended by itself.

    `launcher` is what Python runs; `meanwhile` is called while the server starts.
    """
    with ExitStack() as stack:
        port, meeting = stack.enter_context(kept_port()), stack.enter_context(kept_port())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-")))
        flags = (f"--port={port}", "--hostname=127.0.0.1", f"--shard-uds-path={folder}/shard")
        process = _start([*launcher, *flags, f"--master-port={meeting}", *args], env or {})
        server = Server(process, port, folder)
        ready = Event()

        def pump() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                server.lines.append(line.rstrip("\n"))
                if f":{port}/generate" in line:
                    ready.set()
            server.is_silent.set()
            ready.set()

        thread = Thread(target=pump, daemon=True)
        thread.start()
        try:
            if meanwhile is not None:
                meanwhile(server)
            assert ready.wait(READY_SECONDS), f"not ready in {READY_SECONDS} s:\n{server.log}"
            assert not server.is_silent.is_set(), f"ended before it was ready:\n{server.log}"
            yield server
        finally:
            _end(process)
            thread.join(END_SECONDS)
            if process.stdout is not None:
                process.stdout.close()


def _start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Python with `argv`; one pipe has what it prints."""
    return subprocess.Popen(
        [sys.executable, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        process.kill()
    process.wait()


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """JSON of each `data:` line."""
    for line in lines:
        if line.startswith("data:") and "[DONE]" not in line:
            yield json.loads(line[5:])
