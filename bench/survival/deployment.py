"""A launcher whose children are to be harmed: which process is which, and what the log says since when."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.serve import RunningServer, free_port, running
from bench.survival.log_lines import Line, parse_lines

LAUNCHER = ("-m", "millrace_launcher")
FIND_SECONDS = 60.0
POLL_SECONDS = 0.01


class NoShard(Exception):  # noqa: N818
    """There is no process of that rank, though one was waited for."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A server that was started here, and its log in JSON."""

    server: RunningServer
    log: Path

    @property
    def url(self) -> str:
        """Base URL."""
        return self.server.url

    def lines(self) -> list[Line]:
        """Everything logged so far."""
        return parse_lines(self.log.read_text(errors="replace"))

    def by_role(self) -> dict[str, psutil.Process]:
        """The processes that live now, by `launcher`, `router` and `shard-N`."""
        found = {}
        for process in self.server.processes():
            try:
                role = role_of(process.cmdline())
                if role is not None and process.status() != psutil.STATUS_ZOMBIE:
                    found[role] = process
            except psutil.NoSuchProcess:
                continue
        return found

    def shard(self, rank: int, *, unlike: int = 0) -> psutil.Process:
        """The process of a rank, waited for while it is being restarted; not the one of pid `unlike`.

        Raises NoShard.
        """
        deadline = time.monotonic() + FIND_SECONDS
        while time.monotonic() < deadline:
            process = self.by_role().get(f"shard-{rank}")
            if process is not None and process.pid != unlike:
                return process
            time.sleep(POLL_SECONDS)
        raise NoShard(f"no process of rank {rank} within {FIND_SECONDS:.0f} s")

    def harm(self, rank: int, number: signal.Signals, *, unlike: int = 0) -> tuple[float, int]:
        """Send a signal to a rank; when, in seconds of `time.perf_counter`, and to which pid. Raises NoShard."""
        process = self.shard(rank, unlike=unlike)
        at = time.perf_counter()
        process.send_signal(number)
        return at, process.pid


def role_of(command: Sequence[str]) -> str | None:
    """What a process of ours is, by its command line; None for anything else.

    A child counts from the moment it is forked, when it still is the program that becomes it.
    """
    if "serve" in command:
        ranks = [word.partition("=")[2] for word in command if word.startswith("--rank=")]
        return f"shard-{ranks[0] if ranks else 0}"
    if "millrace_router" in command:
        return "router"
    if "millrace_launcher" in command or any("launcher.py" in word for word in command):
        return "launcher"
    return None


@contextmanager
def deployed(
    model: Path,
    *flags: str,
    log: Path,
    launcher: Sequence[str] = LAUNCHER,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Deployment]:
    """Run a launcher with `flags` for the length of the block; raises ServerError.

    `launcher` is what Python is told to run.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="millrace-survival-") as scratch:
        command = [
            sys.executable,
            *launcher,
            f"--model-id={model}",
            "--json-output",
            "--hostname=127.0.0.1",
            f"--port={port}",
            f"--shard-uds-path={scratch}/shard",
            f"--master-port={free_port()}",
            *flags,
        ]
        offline = {"HF_HUB_OFFLINE": "1", **(environment or {})}
        with running(command, port=port, log=log, environment=offline) as server:
            yield Deployment(server, log)
