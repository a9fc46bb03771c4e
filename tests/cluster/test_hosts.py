"""A model over two hosts, and its router on a third: hosts lose power and links are cut under load."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import pytest
from bench.faults.streams import Answer, Clients, differences

from millrace_launcher.demo import demo_folder
from millrace_testing.cluster.hosts import Host, Program
from millrace_testing.launcher.deployment import Certificate
from millrace_testing.launcher.e2e import END_SECONDS, Server, until, wait_for

pytestmark = pytest.mark.cluster

MIDDLE = 20
NOTICED = "cannot open a stream"
RECOVERED = re.compile(r"the shards serve again seconds=([\d.]+)")
PORT, MEETING, RANK_PORT = 3000, 29500, 9000


class Deployment:
    """Ranks 0 and 1 on the first two hosts, the router on the third."""

    def __init__(self, hosts: Sequence[Host], files: Certificate) -> None:
        self.hosts = hosts
        self._files = files
        self.ranks: list[Program] = [self.start_rank(0), self.start_rank(1)]
        addresses = ",".join(f"{host.address}:{RANK_PORT}" for host in hosts[:2])
        self.router = hosts[2].python(
            *("-m", "millrace_launcher", f"--model-id={demo_folder()}"),
            *(f"--remote-shards={addresses}", "--hostname=0.0.0.0", f"--port={PORT}"),
            *self._tls("shard-tls"),
        )
        self.url = f"http://{hosts[2].address}:{PORT}"

    def start_rank(self, rank: int) -> Program:
        """Start the supervisor of a rank."""
        host = self.hosts[rank]
        return host.python(
            *("-m", "millrace_launcher", "shards", f"--model-id={demo_folder()}"),
            *("--world-size=2", f"--first-rank={rank}", "--cpu-threads=1", "--deterministic=on"),
            *(f"--master-addr={self.hosts[0].address}", f"--master-port={MEETING}"),
            *(f"--address={host.address}:{RANK_PORT}", *self._tls("tls")),
        )

    def _tls(self, prefix: str) -> list[str]:
        files = self._files
        return [f"--{prefix}-{name}={getattr(files, name)}" for name in ("cert", "key", "ca")]


@pytest.fixture(scope="module")
def deployment(three_hosts: Sequence[Host], files: Certificate) -> Iterator[Deployment]:
    found = Deployment(three_hosts, files)
    wait_for(lambda: any("/generate" in line for line in found.router.lines))
    yield found
    for host in three_hosts:
        host.kill()


def recoveries(program: Program | Server) -> list[str]:
    """Of each recovery the seconds from the loss of a rank to the first new token."""
    return RECOVERED.findall(program.log)


async def test_a_rank_of_one_host_that_is_killed_is_the_measure_of_a_recovery(
    one_host: Server,
    undisturbed: Sequence[Answer],
    record_property: Callable[[str, object], None],
) -> None:
    async with Clients(one_host.url) as clients, asyncio.timeout(END_SECONDS):
        bodies = [answer.body for answer in undisturbed]
        task = asyncio.create_task(clients.send_all(bodies))
        await until(lambda: clients.answers and len(clients.answers[0].events) >= MIDDLE)
        rank = one_host.find("shard-1")
        assert rank is not None
        rank.kill()
        assert differences(undisturbed, await task) == []
        await until(lambda: recoveries(one_host))
    record_property("recovery_seconds", recoveries(one_host)[-1])


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("fault", ["power", "link"])
async def test_a_host_lost_under_load_changes_no_byte_of_any_answer(
    deployment: Deployment,
    undisturbed: Sequence[Answer],
    rank: int,
    fault: str,
    record_property: Callable[[str, object], None],
) -> None:
    host, router = deployment.hosts[rank], deployment.router
    noticed, recovered = router.log.count(NOTICED), len(recoveries(router))
    async with Clients(deployment.url) as clients, asyncio.timeout(END_SECONDS):
        bodies = [answer.body for answer in undisturbed]
        task = asyncio.create_task(clients.send_all(bodies))
        await until(lambda: clients.answers and len(clients.answers[0].events) >= MIDDLE)
        lost = perf_counter()
        if fault == "power":
            host.kill()
        else:
            host.cut()
        await until(lambda: router.log.count(NOTICED) > noticed)
        record_property("noticed_seconds", round(perf_counter() - lost, 2))
        if fault == "power":
            deployment.ranks[rank] = deployment.start_rank(rank)
        else:
            host.mend()
        assert differences(undisturbed, await task) == []
        await until(lambda: len(recoveries(router)) > recovered)
    record_property("recovery_seconds", recoveries(router)[-1])
