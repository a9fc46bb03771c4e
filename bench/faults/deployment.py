"""A launcher whose children are broken on purpose: its processes by role, its log in JSON, its state."""

from __future__ import annotations

import signal
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import orjson
import psutil

from bench.faults.members import GONE, Members, role_of
from bench.harness.scrape import parse
from bench.harness.server import LAUNCHER, STOP_SECONDS, RunningServer, serving


@dataclass(frozen=True, slots=True)
class Line:
    """One record."""

    at: float
    """Unix seconds, by the clock of the process that wrote it."""
    target: str
    """The module that logged it."""
    message: str


def parse_lines(text: str) -> list[Line]:
    """Every record; other lines, such as an incomplete last one, are left out."""
    found = []
    for line in text.splitlines():
        try:
            record = orjson.loads(line)
            at = datetime.fromisoformat(record["timestamp"]).timestamp()
            found.append(Line(at, record["target"], record["fields"]["message"]))
        except (ValueError, TypeError, KeyError):
            continue
    return found


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
                role = role_of(process.cmdline(), process.name())
                if role not in {None, "spare"} and process.status() != psutil.STATUS_ZOMBIE:
                    found[role] = process
            except psutil.NoSuchProcess:
                continue
        return found

    def members(self) -> Members:
        """Every descendant of the launcher."""
        return Members.of(self.launcher)

    def num_shard_starts(self) -> int:
        """Processes of shards that were started so far."""
        return sum(line.message.startswith("Starting shard") for line in self.lines())

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
    every = ["--json-output", f"--num-shard={num_ranks}", *flags]
    with (
        tempfile.TemporaryDirectory(prefix="millrace-faults-") as name,
        serving(
            model,
            log=log,
            flags=every,
            environment=environment,
            launcher=launcher,
            sockets=(folder := Path(name)),
        ) as server,
    ):
        yield Deployment(server=server, log=log, folder=folder, num_ranks=num_ranks)
