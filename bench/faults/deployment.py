"""A launcher whose children are broken on purpose: its processes by role, its log, its state."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.faults.log_lines import Line, parse_lines
from bench.faults.members import GONE, Members, role_of
from bench.harness.scrape import parse
from bench.harness.server import STOP_SECONDS, RunningServer, free_port, running

LAUNCHER = ("-m", "millrace_launcher")
FIND_SECONDS = 60.0
POLL_SECONDS = 0.01


class NoShard(Exception):  # noqa: N818
    """No process of that rank appeared in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A server that was started here, and its log in JSON."""

    server: RunningServer
    log: Path
    folder: Path
    """The folder of its sockets, with nothing else in it."""
    num_ranks: int = 1

    @property
    def url(self) -> str:
        """Base URL."""
        return self.server.url

    @property
    def launcher(self) -> psutil.Process:
        """Its first process."""
        return self.server.process

    @property
    def has_ended(self) -> bool:
        """Whether the launcher ended by itself."""
        try:
            return self.launcher.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

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

    def members(self) -> Members:
        """Every descendant of the launcher."""
        return Members.of(self.launcher)

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

    def send_signal(
        self, rank: int, number: signal.Signals, *, unlike: int = 0
    ) -> tuple[float, int]:
        """Send a signal to a rank; when, in seconds of `time.perf_counter`, and to which pid. Raises NoShard."""
        process = self.shard(rank, unlike=unlike)
        at = time.perf_counter()
        process.send_signal(number)
        return at, process.pid

    def is_ready(self) -> bool:
        """Whether `/readyz` answers 200."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def metrics(self) -> dict[str, float]:
        """Value by series; raises OSError while the router is down."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            return parse(response.read().decode())

    def leftovers(self) -> list[str]:
        """Command lines of all processes, whatever their parent, that name the folder."""
        found = []
        for process in psutil.process_iter():
            with suppress(*GONE):
                command = " ".join(process.cmdline())
                if str(self.folder) in command:
                    found.append(f"{process.pid}: {command[:200]}")
        return found

    def stop(self) -> int | None:
        """Send SIGTERM; the exit code, or None where the launcher did not end in time."""
        try:
            self.launcher.send_signal(signal.SIGTERM)
            return self.launcher.wait(STOP_SECONDS)
        except (psutil.TimeoutExpired, psutil.NoSuchProcess):
            return None


@contextmanager
def deployed(
    model: Path,
    *flags: str,
    log: Path,
    num_ranks: int = 1,
    launcher: Sequence[str] = LAUNCHER,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Deployment]:
    """Run a launcher with `flags` for the length of the block; raises ServerError.

    `launcher` holds the arguments of Python.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="millrace-faults-") as folder:
        command = [
            sys.executable,
            *launcher,
            f"--model-id={model}",
            "--json-output",
            "--hostname=127.0.0.1",
            f"--port={port}",
            f"--num-shard={num_ranks}",
            f"--shard-uds-path={folder}/shard",
            f"--master-port={free_port()}",
            *flags,
        ]
        offline = {"HF_HUB_OFFLINE": "1", **(environment or {})}
        with running(command, port=port, log=log, environment=offline) as server:
            yield Deployment(server=server, log=log, folder=Path(folder), num_ranks=num_ranks)
