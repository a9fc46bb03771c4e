"""Replicas on Ray Serve whose ranks are on two nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from bench.faults.streams import Answer, Clients, differences

from millrace_testing.cluster.hosts import ranks_on
from millrace_testing.cluster.serving import Served
from millrace_testing.launcher.e2e import END_SECONDS, until, wait_for

pytestmark = pytest.mark.cluster

MIDDLE = 20
FLAGS = ("cluster=ray", "num_shard=2", "shards_per_node=1", "num_cpus=0", "deterministic=on")


async def test_a_dead_node_of_a_rank_changes_no_byte_of_any_answer(
    served: Served, undisturbed: Sequence[Answer]
) -> None:
    served.cluster.rejoin()
    await asyncio.to_thread(served.delete)
    await until(lambda: served.ranks() == 0)
    await served.deploy(*FLAGS)
    hosts = served.cluster.hosts
    before = ranks_on(hosts)
    assert sorted(before.values()) == [0, 1, 1]
    launchers = served.launchers()
    (launcher,) = launchers
    lost = next(host for host in hosts if before[host.name] and host is not launcher.host)
    async with Clients(served.url_of_head) as clients, asyncio.timeout(END_SECONDS):
        bodies = [answer.body for answer in undisturbed]
        task = asyncio.create_task(clients.send_all(bodies))
        await until(lambda: clients.answers and len(clients.answers[0].events) >= MIDDLE)
        lost.kill()
        assert differences(undisturbed, await task) == []
    after = ranks_on(hosts)
    assert sorted(after.values()) == [0, 1, 1]
    assert after[lost.name] == 0
    assert served.launchers() == launchers


def test_an_application_that_is_deleted_leaves_no_ranks(served: Served) -> None:
    assert served.delete() == "REMOVED"
    wait_for(lambda: served.ranks() == 0)
    assert served.launchers() == []
