"""Starts a server, waits until it is healthy, runs levels against it, and stops it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.harness.machine import CpuMeter, Family, family
from millrace.load.apis import TGI, Dialect
from millrace.load.levels import Level, closed
from millrace.load.load import run_level
from millrace.load.measurement import Measurement, summarise

LAUNCHER = ("-m", "millrace_launcher")
READY_SECONDS = 600.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.1
WARM_UP = replace(closed(4, 128, 16, rounds=1), name="warm-up")


class ServerError(Exception):
    """The server did not start, or died; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers `/health`."""

    url: str
    process: psutil.Process
    dialect: Dialect = TGI

    def processes(self) -> list[psutil.Process]:
        """Launcher, router and shards, as they are now."""
        return family(self.process) if self.process.is_running() else []

    @property
    def family(self) -> Family:
        """The same processes, to be frozen while another server is measured."""
        return Family(self.process.pid)


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serving(
    model: Path,
    *,
    log: Path,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    launcher: Sequence[str] = LAUNCHER,
    sockets: Path | None = None,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[RunningServer]:
    """Run a server of `model` for the length of the block; raises ServerError, also if it is not ready in time.

    `launcher` are Python's arguments that start `millrace-launcher`; `sockets` is the folder of the shards' sockets.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch:
        command = [
            sys.executable,
            *launcher,
            f"--model-id={model}",
            "--hostname=127.0.0.1",
            f"--port={port}",
            f"--shard-uds-path={sockets or scratch}/shard",
            f"--master-port={free_port()}",
            *flags,
        ]
        offline = {"HF_HUB_OFFLINE": "1", **(environment or {})}
        with running(
            command, port=port, log=log, environment=offline, ready_seconds=ready_seconds
        ) as server:
            yield server


@contextmanager
def running(
    command: Sequence[str],
    *,
    port: int,
    log: Path,
    environment: Mapping[str, str],
    dialect: Dialect = TGI,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[RunningServer]:
    """Run a server's command for the length of the block; raises ServerError.

    `environment` is added to our own. The block begins once `/health` answers on `port`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        server = RunningServer(
            f"http://127.0.0.1:{port}", psutil.Process(launcher.pid), dialect=dialect
        )
        try:
            _wait_until_healthy(server, launcher, log, ready_seconds)
            yield server
        finally:
            _stop(launcher, server)


def _wait_until_healthy(
    server: RunningServer, launcher: subprocess.Popen[bytes], log: Path, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if launcher.poll() is not None:
            raise ServerError(f"the launcher ended with {launcher.returncode}:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=10):
                return
        except urllib.error.HTTPError as refusal:
            refusal.close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(POLL_SECONDS)
    raise ServerError(f"no /health within {seconds:.0f} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def _stop(launcher: subprocess.Popen[bytes], server: RunningServer) -> None:
    """Send SIGTERM, and SIGKILL to the processes that are left after the grace time."""
    processes = server.processes()
    server.family.thaw()
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS)
    for process in alive:
        process.kill()
    launcher.wait()


def measure(server: RunningServer, level: Level, *, name: str = "millrace") -> Measurement:
    """Run one level against the server and reduce it, with the shares of the CPU."""
    meter = CpuMeter(server.processes)
    outcome = asyncio.run(run_level(server.url, level, dialect=server.dialect))
    use = meter.stop()
    measurement = summarise(name, level, outcome.timelines, failures=outcome.failures)
    return replace(measurement, client_cores=use.client_cores, other_cores=use.other_cores)
