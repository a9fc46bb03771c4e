"""The actor on each host: it runs `millrace-launcher shards` there."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import ray

from millrace_proto.version import VERSION
from millrace_ray.certificates import Pem
from millrace_ray.child import bound
from millrace_ray.host import Host, free_ports

STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class State:
    """The supervisor of an actor's ranks."""

    has_started: bool
    """Not yet in an actor that Ray has restarted."""
    exit_code: int | None = None
    """None while it runs."""


class RankActor:
    """Supervises the ranks of its host, through a process of the launcher's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-ray-")

    def host(self, num_ports: int) -> Host:
        """Where this actor is, and what is installed there."""
        return Host(
            address=ray.util.get_node_ip_address(),
            ports=free_ports(num_ports),
            millrace=VERSION,
            torch=metadata.version("torch"),
        )

    def start(self, argv: Sequence[str], pem: Pem) -> None:
        """Run the ranks; those that run already end first."""
        self.stop()
        folder = Path(self._folder.name)
        files = []
        for name, content in (("cert", pem.cert), ("key", pem.key), ("ca", pem.ca)):
            path = folder / f"{name}.pem"
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
            path.write_bytes(content)
            files.append(f"--tls-{name}={path}")
        program = [sys.executable, "-m", "millrace_launcher", "shards", *argv, *files]
        self._process = subprocess.Popen(  # noqa: S603
            bound(program), stdin=subprocess.DEVNULL, process_group=0
        )

    def state(self) -> State:
        """Whether the ranks' supervisor runs."""
        if self._process is None:
            return State(has_started=False)
        return State(has_started=True, exit_code=self._process.poll())

    def stop(self) -> None:
        """End the ranks in an orderly way."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        process.wait()
