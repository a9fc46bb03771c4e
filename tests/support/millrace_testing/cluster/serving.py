"""Replicas on Ray Serve, in a cluster of hosts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from millrace_launcher.demo import demo_folder
from millrace_testing.cluster.hosts import Host, Program
from millrace_testing.cluster.ray_cluster import RayCluster
from millrace_testing.launcher.e2e import END_SECONDS

PORT = 3000
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Launched:
    """The launcher of a replica."""

    host: Host
    pid: int
    address: str
    port: int

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.address}:{self.port}"

    def variable(self, name: str) -> str:
        """One of its environment."""
        text = Path(f"/proc/{self.pid}/environ").read_text()
        return dict(pair.partition("=")[::2] for pair in text.split("\0"))[name]

    @property
    def worker(self) -> int:
        """The process of its actor."""
        return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[1])


class Served:
    """The application; clients come to the last node."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self.host = cluster.hosts[-1]
        self.url = f"http://{self.host.address}:{PORT}"

    def serve(self, *arguments: str) -> Program:
        """`serve run` with these arguments; it ends when all replicas run."""
        return self.cluster.head.python(
            *("-m", "ray.serve.scripts", "run", "--non-blocking", "millrace_ray:app"),
            *(f"model_id={demo_folder()}", "num_cpus=1", *arguments),
            environment={"RAY_ADDRESS": self.cluster.address},
        )

    async def deploy(self, *arguments: str) -> None:
        """`serve run`, until it is done and only its replicas are left."""
        program = self.serve(*arguments)
        while program.process.poll() is None:
            await asyncio.sleep(POLL_SECONDS)
        assert program.process.returncode == 0, program.log

    def launchers(self) -> list[Launched]:
        """Of all replicas on hosts that live."""
        found = []
        for host in self.cluster.hosts:
            for pid in host.pids():
                words = _words(pid)
                if "millrace_launcher" in words and "--hostname" in " ".join(words):
                    flags = dict(word.partition("=")[::2] for word in words)
                    found.append(Launched(host, pid, flags["--hostname"], int(flags["--port"])))
        return found

    def ranks(self) -> int:
        """Processes of ranks on all nodes."""
        pids = [pid for host in self.cluster.hosts for pid in host.pids()]
        return sum("millrace_shard" in _words(pid) for pid in pids)

    def is_ready(self, host: Host) -> bool:
        """Whether requests to the proxy on a host would run."""
        connection = HTTPConnection(host.address, PORT, timeout=END_SECONDS)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
