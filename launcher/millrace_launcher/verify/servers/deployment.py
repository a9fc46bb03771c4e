"""Starts a server for the length of a block: a launcher on a free port, with sockets in a new folder.

The launcher ends with this process in any case, and the launcher's guard ends its children.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from millrace_launcher.verify.servers.client import Client

LAUNCHER = ("-m", "millrace_launcher")
READY_SECONDS = 3600.0
STOP_SECONDS = 60.0
FIND_SECONDS = 60.0
POLL_SECONDS = 0.1
PROCESSES = Path("/proc")


class StartError(Exception):
    """The launcher ended before it was ready; the message has its last error."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log
        """The end of the launcher's log."""


class NoShard(Exception):  # noqa: N818
    """No shard process was found."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A ready server."""

    client: Client
    socket_prefix: str

    def kill_shard(self) -> int:
        """Send SIGKILL to the first shard and return its process id. Raises NoShard."""
        deadline = time.monotonic() + FIND_SECONDS
        while time.monotonic() < deadline:
            for pid in self._shards():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return pid
            time.sleep(POLL_SECONDS)
        raise NoShard(f"no process serves {self.socket_prefix}")

    def _shards(self) -> list[int]:
        """Process ids with this deployment's socket path in their command line."""
        mark = f"--uds-path={self.socket_prefix}".encode()
        found = []
        for path in PROCESSES.glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return sorted(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployer:
    """Starts servers; each has its own log file."""

    model: str | None
    """A folder or a name on the hub; the demo model if None."""
    logs: Path
    """Folder of log files."""
    revision: str | None = None
    api_key: str | None = None
    flags: tuple[str, ...] = ()
    """The user's flags for every server; flags of a case follow and take precedence."""
    launcher: Sequence[str] = LAUNCHER
    """Python's arguments that start the launcher."""

    @contextmanager
    def deployed(self, name: str, *flags: str) -> Iterator[Deployment]:
        """Run a launcher during the block, which begins when it is ready. Raises StartError."""
        with (
            tempfile.TemporaryDirectory(prefix="millrace-verify-") as folder,
            _kept_port() as port,
        ):
            sockets = f"{folder}/shard"
            command = [
                *(sys.executable, "-m", "millrace_launcher.processes.child", str(os.getpid())),
                *(sys.executable, *self.launcher),
                *(() if self.model is None else (f"--model-id={self.model}",)),
                *(() if self.revision is None else (f"--revision={self.revision}",)),
                *self.flags,
                *("--hostname=127.0.0.1", f"--port={port}", f"--shard-uds-path={sockets}"),
                *flags,
            ]
            log = self.logs / f"{name}.log"
            with log.open("wb") as output:
                launcher = subprocess.Popen(  # noqa: S603
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    client = Client(f"http://127.0.0.1:{port}", self.api_key)
                    _wait_until_ready(launcher, client, log)
                    yield Deployment(client, sockets)
                finally:
                    _stop(launcher)


@contextmanager
def _kept_port() -> Iterator[int]:
    """A port that the kernel gives to no other process during the block.

    The router can listen on it, since both sockets set SO_REUSEADDR and this one does not listen.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield int(keeper.getsockname()[1])


def _wait_until_ready(launcher: subprocess.Popen[bytes], client: Client, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not client.is_ready():
        if launcher.poll() is not None or time.monotonic() > deadline:
            text = log.read_text(errors="replace")
            raise StartError(_last_error(text), "\n".join(text.splitlines()[-40:]))
        time.sleep(POLL_SECONDS)


def _last_error(log: str) -> str:
    """The last error in the log of the launcher or its children."""
    errors = [line.strip() for line in log.splitlines() if "rror: " in line]
    words = [line for line in errors if not line.startswith("Error: ShardCannotStart")] or errors
    return words[-1] if words else "the server did not start"


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and SIGKILL after the grace; the launcher's guard ends remaining children."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    try:
        launcher.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
