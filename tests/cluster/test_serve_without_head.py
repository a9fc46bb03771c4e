"""Replicas on Ray Serve while the cluster's head is away, when it is back, and when it stays away."""

from __future__ import annotations

import asyncio

import pytest

from millrace_testing.cluster.load import load
from millrace_testing.cluster.ray_cluster import Redis
from millrace_testing.cluster.serving import Served
from millrace_testing.launcher.e2e import END_SECONDS, until

pytestmark = pytest.mark.cluster


async def test_streams_go_on_while_the_head_is_away_and_it_places_again_when_it_is_back(
    served: Served, head_store: Redis | None
) -> None:
    if head_store is None:
        pytest.skip("there is no Redis")
    cluster = served.cluster
    cluster.rejoin()
    await served.deploy("num_replicas=1")
    before = served.launchers()
    async with load(served.url, 2) as clients, asyncio.timeout(2 * END_SECONDS):
        await until(lambda: clients.num_served > 8)
        cluster.head.kill()
        await clients.serves_on()
        assert served.launchers() == before
        head = cluster.start_head()
        await until(lambda: "Ray runtime started" in head.log)
        await clients.serves_on()
        assert served.launchers() == before
        await served.deploy("num_replicas=1", "max_concurrent_requests=78")
        await until(lambda: not set(before) & set(served.launchers()))
        await clients.serves_on()
    new = served.launchers()
    assert [launcher.variable("MAX_CONCURRENT_REQUESTS") for launcher in new] == ["78"]
    assert clients.errors() == []


async def test_a_cluster_ends_with_its_head(served: Served, head_store: Redis | None) -> None:
    if head_store is None:
        await served.deploy("num_replicas=1")
    else:
        head_store.kill()
    served.cluster.head.kill()
    async with asyncio.timeout(END_SECONDS):
        await until(lambda: served.ranks() == 0)
        await until(lambda: not any(served.is_ready(host) for host in served.cluster.hosts))
    assert served.launchers() == []
