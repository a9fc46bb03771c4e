"""Starts the real launcher on a free port and talks to it over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import psutil
from bench.survival.deployment import role_of

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 180


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass
class Server:
    """A running launcher."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str]
    sockets: Path

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def find(self, role: str) -> psutil.Process | None:
        """The child of that role that lives now."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if role_of(child.cmdline()) == role and child.status() != psutil.STATUS_ZOMBIE:
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
        """No step of the shard ends meanwhile."""
        stopped = self.shard
        stopped.suspend()
        try:
            yield
        finally:
            stopped.resume()

    def metrics(self) -> dict[str, float]:
        """Unlabelled samples of /metrics."""
        samples = {}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line and not line.startswith("#") and "{" not in line:
                name, value = line.split()
                samples[name] = float(value)
        return samples


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
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        sockets = Path(folder)
        process = subprocess.Popen(
            [
                *(sys.executable, *launcher, f"--port={port}", "--hostname=127.0.0.1"),
                *(f"--shard-uds-path={sockets}/shard", f"--master-port={free_port()}", *args),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                **(env or {}),
            },
        )
        server = Server(process, port, [], sockets)
        ready, ended = Event(), Event()

        def pump() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                server.lines.append(line.rstrip("\n"))
                if f":{port}/generate" in line:
                    ready.set()
            ended.set()
            ready.set()

        thread = Thread(target=pump, daemon=True)
        thread.start()
        try:
            if meanwhile is not None:
                meanwhile(server)
            assert ready.wait(READY_SECONDS), f"not ready in {READY_SECONDS} s:\n{server.log}"
            assert not ended.is_set(), f"ended before it was ready:\n{server.log}"
            yield server
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
            thread.join(10)
            if process.stdout is not None:
                process.stdout.close()


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """JSON of each `data:` line."""
    for line in lines:
        if line.startswith("data:") and "[DONE]" not in line:
            yield json.loads(line[5:])
