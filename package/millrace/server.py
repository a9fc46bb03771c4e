"""A server of a model for the length of a block: a launcher on a free port, with sockets in a new folder.

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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from millrace.download import download
from millrace.errors import StartError
from millrace_launcher.errors import LaunchError
from millrace_launcher.settings.arguments import read_settings

LAUNCHER = ("-m", "millrace_launcher")
HOST = "127.0.0.1"
READY_SECONDS = 3600.0
STOP_SECONDS = 60.0
FIND_SECONDS = 60.0
POLL_SECONDS = 0.1
ANSWER_SECONDS = 60.0
LOG_LINES = 40
PROCESSES = Path("/proc")
ERROR = "ERROR"
"""The word of the launcher's log for the level."""


class NoShard(Exception):  # noqa: N818
    """No shard process was found."""


@contextmanager
def serving(model: str | None, flags: Sequence[str], *, program: str) -> Iterator[str]:
    """Serve a model, or the demo model, on a free port of this machine; the value is the URL.

    `flags` are the launcher's; SystemExit 2 with a message that names `program` if they are wrong. On a terminal
    Events are reported on stderr. The server has ended when the block has. Raises StartError.
    """
    settings = read_settings(
        [*(() if model is None else (f"--model-id={model}",)), *flags], program=program
    )
    sys.stderr.write(f"Starting a server for {model or 'the demo model'}\n")
    if model is not None and sys.stderr.isatty() and not Path(model).exists():
        # The server's log is in a file, and a download may take long.
        try:
            download(settings, model)
        except LaunchError as error:
            raise StartError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="millrace-") as logs:
        servers = LocalServers(model=model, logs=Path(logs), flags=tuple(flags))
        try:
            with servers.running("server") as server:
                yield server.url
        except StartError as error:
            raise StartError(_reasons(error)) from error


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A ready server on this machine."""

    url: str
    socket_prefix: str
    """Paths of the shards' sockets, without the rank that is appended."""

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
        """Process ids with this server's socket path in their command line."""
        mark = f"--uds-path={self.socket_prefix}".encode()
        pids = []
        for path in PROCESSES.glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
        return sorted(pids)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServers:
    """Starts servers of one model; each has its own log file."""

    model: str | None
    """A folder or a name on the hub; the demo model if None."""
    logs: Path
    """Folder of log files."""
    revision: str | None = None
    flags: tuple[str, ...] = ()
    """The user's flags for every server; the flags of `running` follow and take precedence."""
    launcher: Sequence[str] = LAUNCHER
    """Python's arguments that start the launcher."""

    @contextmanager
    def running(self, name: str, *flags: str) -> Iterator[LocalServer]:
        """Run a launcher during the block, which begins when it is ready; its log is `name`.log. Raises StartError."""
        with (
            tempfile.TemporaryDirectory(prefix="millrace-") as folder,
            kept_port() as port,
        ):
            sockets = f"{folder}/shard"
            command = [
                *(sys.executable, "-m", "millrace_launcher.processes.child", str(os.getpid())),
                *(sys.executable, *self.launcher),
                *(() if self.model is None else (f"--model-id={self.model}",)),
                *(() if self.revision is None else (f"--revision={self.revision}",)),
                *self.flags,
                *(f"--hostname={HOST}", f"--port={port}", f"--shard-uds-path={sockets}"),
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
                    _wait_until_ready(launcher, port, log)
                    yield LocalServer(f"http://{HOST}:{port}", sockets)
                finally:
                    _stop(launcher)


@contextmanager
def kept_port() -> Iterator[int]:
    """A port that the kernel gives to no other process during the block.

    The router can listen on it, since both sockets set SO_REUSEADDR and this one does not listen.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((HOST, 0))
        yield int(keeper.getsockname()[1])


def is_ready(port: int) -> bool:
    """Whether `/readyz` of a server on this machine answers 200."""
    with closing(HTTPConnection(HOST, port, timeout=ANSWER_SECONDS)) as connection:
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False


def _wait_until_ready(launcher: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not is_ready(port):
        if launcher.poll() is not None or time.monotonic() > deadline:
            text = log.read_text(errors="replace")
            raise StartError(_last_error(text), "\n".join(text.splitlines()[-LOG_LINES:]))
        time.sleep(POLL_SECONDS)


def _last_error(log: str) -> str:
    """The last error in the log of the launcher or its children."""
    errors = [line.strip() for line in log.splitlines() if "rror: " in line]
    words = [line for line in errors if not line.startswith("Error: ShardCannotStart")] or errors
    return words[-1] if words else "the server did not start"


def _reasons(error: StartError) -> str:
    """The errors in the server's log, else the end of the log."""
    lines = (line.partition(f" {ERROR} ")[2] for line in error.log.splitlines())
    reasons = [line.partition(": ")[2] for line in lines if line]
    return "; ".join(dict.fromkeys(reasons)) or f"{error}\n{error.log}"


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and SIGKILL after the grace; the launcher's guard ends remaining children."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    try:
        launcher.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
