"""The server under test: the launcher in a folder of its own, and who is who among its processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.scheduling.scrape import parse
from bench.serve import ServerError, free_port
from millrace_shard.structured_output.grammar_compiler import MAX_COMPILES

READY_SECONDS = 180.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.05
RANK = re.compile(r"--rank=(\d+)")
GONE = (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied)


@dataclass(slots=True)
class Members:
    """The launcher's descendants by what they are."""

    routers: list[int] = field(default_factory=list)
    ranks: dict[int, list[int]] = field(default_factory=dict)
    """Process ids by rank."""
    guards: list[int] = field(default_factory=list)
    grammar_workers: list[int] = field(default_factory=list)
    """Where rank 0 tries grammars out: a process, once it was needed, and its forks."""
    others: list[str] = field(default_factory=list)
    """Command lines, and the state of those that have ended and that nobody waited for."""

    def add(self, pid: int, command: str) -> None:
        """Sort in a process by its command line."""
        if "millrace_launcher.supervision.guard" in command:
            self.guards.append(pid)
        elif "millrace_shard.structured_output.grammar_worker" in command:
            self.grammar_workers.append(pid)
        elif "millrace_router" in command:
            self.routers.append(pid)
        elif "millrace_shard serve" in command:
            rank = RANK.search(command)
            self.ranks.setdefault(int(rank[1]) if rank else 0, []).append(pid)
        else:
            self.others.append(command)

    def is_complete(self, num_ranks: int) -> bool:
        """Whether there is exactly one router, one guard, one process for each rank, and nothing else to spare."""
        one_each = sorted(self.ranks) == list(range(num_ranks)) and all(
            len(pids) == 1 for pids in self.ranks.values()
        )
        ones = (len(self.routers), len(self.guards), self.others) == (1, 1, [])
        return one_each and ones and len(self.grammar_workers) <= 1 + MAX_COMPILES

    def pids(self) -> set[int]:
        """Router and shards."""
        return {*self.routers, *(pid for pids in self.ranks.values() for pid in pids)}


@dataclass(frozen=True, slots=True)
class Server:
    """A running launcher."""

    process: subprocess.Popen[bytes]
    url: str
    folder: Path
    """Where its sockets are, and nothing else."""
    log: Path
    num_ranks: int

    def members(self) -> Members:
        """Everything that the launcher started and that is still there."""
        members = Members()
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                ended = child.status() == psutil.STATUS_ZOMBIE
                command = "ended, nobody waited for it" if ended else " ".join(child.cmdline())
            except GONE:
                continue
            members.add(child.pid, command)
        return members

    def is_ready(self) -> bool:
        """What `/readyz` says."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def metrics(self) -> dict[str, float]:
        """Value by series."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            return parse(response.read().decode())

    def kin(self) -> list[str]:
        """Command lines of every process, whosever child it is, that names the folder."""
        found = []
        for process in psutil.process_iter():
            with suppress(*GONE):
                command = " ".join(process.cmdline())
                if str(self.folder) in command:
                    found.append(f"{process.pid}: {command[:200]}")
        return found

    def stop(self) -> int | None:
        """SIGTERM; the exit code, or None if it did not end in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def serving(model: Path, *, log: Path, num_ranks: int, flags: Sequence[str]) -> Iterator[Server]:
    """Run the launcher for the length of the block, which begins when it is ready; raises ServerError."""
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="millrace-chaos-") as folder, log.open("wb") as output:
        command = [
            sys.executable,
            "-m",
            "millrace_launcher",
            f"--model-id={model}",
            "--hostname=127.0.0.1",
            f"--port={port}",
            f"--num-shard={num_ranks}",
            f"--shard-uds-path={folder}/shard",
            f"--master-port={free_port()}",
            *flags,
        ]
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            start_new_session=True,
        )
        server = Server(process, f"http://127.0.0.1:{port}", Path(folder), log, num_ranks)
        try:
            _wait_until_ready(server)
            yield server
        finally:
            if server.stop() is None:
                process.kill()
                process.wait()


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not server.is_ready():
        if server.process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-30:])
            raise ServerError(f"not ready (exit code {server.process.poll()}):\n{tail}")
        time.sleep(POLL_SECONDS)
