"""Replicas on Ray Serve, in a cluster of hosts."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from millrace_launcher.demo import demo_folder
from millrace_testing.cluster.hosts import Host, Program, ranks_on, words_of
from millrace_testing.cluster.ray_cluster import RayCluster
from millrace_testing.launcher.e2e import END_SECONDS

PORT = 3000
POLL_SECONDS = 0.1
NUM_CPUS = 0.5
"""Of a replica, unless told: two fit on a host."""


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
    def is_listening(self) -> bool:
        """Whether it takes connections."""
        try:
            socket.create_connection((self.address, self.port), END_SECONDS).close()
        except ConnectionError:
            return False
        return True

    @property
    def worker(self) -> int:
        """The process of its actor."""
        return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[1])


class Served:
    """The application. Clients come to the last node, or to the head, which runs no replica."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self.url = f"http://{cluster.hosts[-1].address}:{PORT}"
        self.url_of_head = f"http://{cluster.head.address}:{PORT}"

    def start(self) -> None:
        """Start Ray Serve without its own proxies."""
        self.cluster.ask("None", "from ray import serve; serve.start(proxy_location='Disabled')")

    def serve(self, *arguments: str) -> Program:
        """`serve run` with these arguments; it ends when all replicas run."""
        return self.cluster.head.python(
            *("-m", "ray.serve.scripts", "run", "--non-blocking", "millrace_ray:app"),
            *(f"model_id={demo_folder()}", f"num_cpus={NUM_CPUS}", *arguments),
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
        for host in (self.cluster.head, *self.cluster.hosts):
            for pid in host.pids():
                words = words_of(pid)
                if "millrace_launcher" in words and "--hostname" in " ".join(words):
                    flags = dict(word.partition("=")[::2] for word in words)
                    found.append(Launched(host, pid, flags["--hostname"], int(flags["--port"])))
        return found

    def hosts_by_load(self) -> list[Host]:
        """Those that run replicas; the one with the fewest comes first."""
        counts = Counter(launcher.host.name for launcher in self.launchers())
        hosts = [host for host in self.cluster.hosts if counts[host.name]]
        return sorted(hosts, key=lambda host: counts[host.name])

    def ranks(self) -> int:
        """Processes of ranks on all nodes."""
        return sum(ranks_on(self.cluster.hosts).values())

    def delete(self) -> str:
        """Delete the application; the states that placement groups have then."""
        return self.cluster.ask(
            "*{group['state'] for group in placement_group_table().values()}",
            "from ray import serve; serve.delete('default')",
            "from ray.util import placement_group_table",
        )

    def num_ready(self) -> int:
        """Launchers that serve."""
        return sum(self.is_ready(found.host, found.port) for found in self.launchers())

    def is_ready(self, host: Host, port: int = PORT) -> bool:
        """Whether requests to the proxy on a host, or to another port there, would run."""
        connection = HTTPConnection(host.address, port, timeout=END_SECONDS)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()
