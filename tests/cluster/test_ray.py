"""A model over the hosts of a Ray cluster: a node dies under load, and the launcher ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from bench.faults.streams import Answer, Clients, differences

from millrace_launcher.demo import demo_folder
from millrace_testing.cluster.hosts import Program, ranks_on
from millrace_testing.cluster.ray_cluster import RayCluster
from millrace_testing.launcher.e2e import END_SECONDS, until, wait_for

pytestmark = pytest.mark.cluster

MIDDLE = 20
PORT = 3000
START_SECONDS = 180


class Deployment:
    """A launcher on the head, whose ranks are on two of three nodes."""

    def __init__(self, cluster: RayCluster) -> None:
        self.hosts = cluster.hosts
        self._cluster = cluster
        self.launcher = self.launch("--num-shard=2")
        self.url = f"http://{cluster.head.address}:{PORT}"

    def launch(self, *flags: str) -> Program:
        """Start the launcher."""
        return self._cluster.head.python(
            *("-m", "millrace_launcher", f"--model-id={demo_folder()}", "--cluster=ray"),
            *("--hostname=0.0.0.0", f"--port={PORT}", "--deterministic=on", *flags),
            environment={"RAY_ADDRESS": self._cluster.address},
        )


@pytest.fixture(scope="module")
def cluster(ray_cluster: RayCluster) -> Deployment:
    made = Deployment(ray_cluster)
    log = made.launcher
    wait_for(
        lambda: any("/generate" in line for line in log.lines) or log.process.poll() is not None,
        seconds=START_SECONDS,
    )
    assert log.process.poll() is None, log.log
    return made


async def test_a_node_that_dies_under_load_changes_no_byte_of_any_answer(
    cluster: Deployment, undisturbed: Sequence[Answer]
) -> None:
    before = ranks_on(cluster.hosts)
    assert sorted(before.values()) == [0, 1, 1]
    async with Clients(cluster.url) as clients, asyncio.timeout(END_SECONDS):
        bodies = [answer.body for answer in undisturbed]
        task = asyncio.create_task(clients.send_all(bodies))
        await until(lambda: clients.answers and len(clients.answers[0].events) >= MIDDLE)
        lost = next(host for host in cluster.hosts if before[host.name])
        lost.kill()
        assert differences(undisturbed, await task) == []
    after = ranks_on(cluster.hosts)
    assert sorted(after.values()) == [0, 1, 1]
    assert after[lost.name] == 0


def test_missing_nodes_of_the_cluster_are_reported(cluster: Deployment) -> None:
    second = cluster.launch("--num-shard=7", "--port=3001")
    assert second.process.wait(END_SECONDS) == 1
    assert "7 nodes with 1 CPU each are needed" in second.log


def test_ranks_end_with_their_launcher(cluster: Deployment) -> None:
    cluster.launcher.process.kill()
    wait_for(lambda: sum(ranks_on(cluster.hosts).values()) == 0)
