"""A model over the hosts of a Ray cluster: a node dies under load, and the launcher ends."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from bench.faults.streams import Answer, Clients, differences, mixed_bodies

from millrace_launcher.demo import demo_folder
from millrace_testing.cluster.hosts import Host, Program, hosts, missing
from millrace_testing.launcher.e2e import END_SECONDS, until, wait_for

pytestmark = pytest.mark.cluster

STREAMS = mixed_bodies(20, longest=150)
MIDDLE = 20
PORT, HEAD_PORT = 3000, 6379
START_SECONDS = 180
RAY = ("-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--block")


class Cluster:
    """A head, which runs the launcher, and three hosts for ranks."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.head, *self.hosts = hosts
        self._folder = folder
        self._start(
            self.head,
            "--head",
            f"--port={HEAD_PORT}",
            "--num-cpus=0",
            "--include-dashboard=false",
        )
        started = [self.join(host) for host in self.hosts]
        wait_for(lambda: all("Ray runtime started" in program.log for program in started))
        self.launcher = self.launch("--num-shard=2")
        self.url = f"http://{self.head.address}:{PORT}"

    @property
    def address(self) -> str:
        """Of the head."""
        return f"{self.head.address}:{HEAD_PORT}"

    def join(self, host: Host) -> Program:
        """Start Ray on a host."""
        return self._start(host, f"--address={self.address}", "--num-cpus=1")

    def launch(self, *flags: str) -> Program:
        """Start the launcher."""
        return self.head.python(
            *("-m", "millrace_launcher", f"--model-id={demo_folder()}", "--cluster=ray"),
            *("--hostname=0.0.0.0", f"--port={PORT}", "--deterministic=on", *flags),
            environment={"RAY_ADDRESS": self.address},
        )

    def _start(self, host: Host, *flags: str) -> Program:
        folder = self._folder / host.name
        shutil.rmtree(folder, ignore_errors=True)
        memory = "--object-store-memory=80000000"
        return host.python(
            *(*RAY, f"--node-ip-address={host.address}", f"--temp-dir={folder}", memory, *flags)
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if lack := missing():
        pytest.skip(f"hosts cannot be made here: {lack}")
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    # Ray's sockets need short paths.
    with hosts(4) as found, tempfile.TemporaryDirectory(prefix="mr-", dir="/tmp") as folder:
        made = Cluster(found, Path(folder))
        log = made.launcher
        wait_for(
            lambda: (
                any("/generate" in line for line in log.lines) or log.process.poll() is not None
            ),
            seconds=START_SECONDS,
        )
        assert log.process.poll() is None, log.log
        yield made
        for host in found:
            host.kill()


def ranks_on(cluster: Cluster) -> dict[str, int]:
    """How many ranks each host runs."""
    counts = {}
    for host in cluster.hosts:
        lines = [Path(f"/proc/{pid}/cmdline") for pid in host.pids()]
        texts = [path.read_text() for path in lines if path.exists()]
        counts[host.name] = sum("millrace_shard\0serve" in text for text in texts)
    return counts


async def test_a_node_that_dies_under_load_costs_nobody_a_byte(cluster: Cluster) -> None:
    async with Clients(cluster.url) as clients, asyncio.timeout(2 * END_SECONDS):
        undisturbed: list[Answer] = await clients.send_all(STREAMS)
        before = ranks_on(cluster)
        assert sorted(before.values()) == [0, 1, 1]
        clients.answers = []
        task = asyncio.create_task(clients.send_all(STREAMS))
        await until(lambda: clients.answers and len(clients.answers[0].events) >= MIDDLE)
        lost = next(host for host in cluster.hosts if before[host.name])
        lost.kill()
        assert differences(undisturbed, await task) == []
        after = ranks_on(cluster)
        assert sorted(after.values()) == [0, 1, 1]
        assert after[lost.name] == 0


def test_what_the_cluster_lacks_is_said(cluster: Cluster) -> None:
    second = cluster.launch("--num-shard=7", "--port=3001")
    assert second.process.wait(END_SECONDS) == 1
    assert "7 nodes with 1 CPU each are needed" in second.log


def test_ranks_end_with_their_launcher(cluster: Cluster) -> None:
    cluster.launcher.process.kill()
    wait_for(lambda: sum(ranks_on(cluster).values()) == 0)
