"""A server of our own: a launcher on a free port, with sockets in a folder of its own, ended with the block.

However this process ends, the launcher ends with it, and the launcher's guard sees to the rest.
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
    """The launcher ended before it served; the message has its last error."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log
        """The end of its log."""


class NoShard(Exception):  # noqa: N818
    """No process of a shard can be found."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A server that is ready."""

    client: Client
    socket_prefix: str

    def kill_shard(self) -> int:
        """Send SIGKILL to the first shard; its process id. Raises NoShard."""
        deadline = time.monotonic() + FIND_SECONDS
        while time.monotonic() < deadline:
            for pid in self._shards():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return pid
            time.sleep(POLL_SECONDS)
        raise NoShard(f"no process serves {self.socket_prefix}")

    def _shards(self) -> list[int]:
        """Process ids of those that were told our socket, which no other deployment's were."""
        mark = f"--uds-path={self.socket_prefix}".encode()
        found = []
        for path in PROCESSES.glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return sorted(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployer:
    """How servers are started; each writes a log of its own."""

    model: str | None
    """A folder or a name on the hub; the demo model when None."""
    logs: Path
    """Folder."""
    revision: str | None = None
    api_key: str | None = None
    flags: tuple[str, ...] = ()
    """The user's, for every server; those of a case come after them, and win."""
    launcher: Sequence[str] = LAUNCHER
    """What Python is told to run."""

    @contextmanager
    def deployed(self, name: str, *flags: str) -> Iterator[Deployment]:
        """Run a launcher for the length of the block, which begins when it is ready. Raises StartError."""
        with (
            tempfile.TemporaryDirectory(prefix="millrace-verify-") as folder,
            _kept_port() as port,
        ):
            sockets = f"{folder}/shard"
            command = [
                *(sys.executable, "-m", "millrace_launcher.supervision.child", str(os.getpid())),
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
    """A port that the kernel gives to nobody else meanwhile: another server there would be taken for ours.

    The router listens on it all the same, as both set SO_REUSEADDR and this socket does not listen.
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
    """What the launcher, or the child that ended it, said last of what went wrong."""
    errors = [line.strip() for line in log.splitlines() if "rror: " in line]
    words = [line for line in errors if not line.startswith("Error: ShardCannotStart")] or errors
    return words[-1] if words else "the server did not start"


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL after the grace; its guard ends whatever it leaves."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    try:
        launcher.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
