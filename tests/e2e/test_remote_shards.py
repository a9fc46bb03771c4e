"""Ranks by `millrace-launcher shards` over TLS, as on two hosts, and a router that starts none."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import psutil
import pytest
import trustme
from bench.faults.streams import Clients, differences, mixed_bodies

from millrace_launcher.demo import demo_folder
from millrace_testing.launcher.deployment import certificate, kept_port
from millrace_testing.launcher.e2e import END_SECONDS, Program, Server, launch, start, until

STREAMS = mixed_bodies(8, longest=150)
MIDDLE = 20
ANEW = "meets the others anew"
"""What a supervisor says of a rank that ended for another one's sake."""


@dataclass
class Split:
    """A server whose ranks have supervisors of their own."""

    server: Server
    hosts: list[Program]

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        host = psutil.Process(self.hosts[number].process.pid)
        for child in host.children(recursive=True):
            if "serve" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                return child
        raise AssertionError(self.hosts[number].log)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("certificates")
    files = certificate(folder, "all", "localhost", "127.0.0.1", authority=trustme.CA())
    tls = (f"cert={files.cert}", f"key={files.key}", f"ca={files.ca}")
    with ExitStack() as stack:
        meeting = stack.enter_context(kept_port())
        ports = [stack.enter_context(kept_port()) for _ in range(2)]
        hosts = [
            stack.enter_context(
                start(
                    *("-m", "millrace_launcher", "shards", f"--model-id={demo_folder()}"),
                    *("--world-size=2", f"--first-rank={rank}", "--num-shard=1"),
                    *("--master-addr=127.0.0.1", f"--master-port={meeting}"),
                    *(f"--address=localhost:{port}", "--cpu-threads=1", "--deterministic=on"),
                    *(f"--tls-{each}" for each in tls),
                )
            )
            for rank, port in enumerate(ports)
        ]
        addresses = ",".join(f"localhost:{port}" for port in ports)
        flags = (f"--remote-shards={addresses}", *(f"--shard-tls-{each}" for each in tls))
        # The router's host has no weights.
        small = tmp_path_factory.mktemp("small")
        for path in demo_folder().glob("*.json"):
            shutil.copy(path, small)
        server = stack.enter_context(launch(*flags, "--step-timeout=10", f"--model-id={small}"))
        yield Split(server, hosts)


@pytest.mark.long
@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.long)])
async def test_streams_go_on_when_a_rank_is_killed(split: Split, number: int) -> None:
    async with Clients(split.server.url) as clients, asyncio.timeout(END_SECONDS):
        undisturbed = await clients.send_all(STREAMS)
        clients.answers = []
        before = {each.pid for each in map(split.rank, range(2))}
        others = split.hosts[1 - number]
        met = others.log.count(ANEW)
        task = asyncio.create_task(clients.send_all(STREAMS))
        await until(lambda: clients.answers and len(clients.answers[0].events) >= MIDDLE)
        split.rank(number).kill()
        assert differences(undisturbed, await task) == []
        # The other one has ended, too: it cannot go on without its peer.
        assert not before & {each.pid for each in map(split.rank, range(2))}
        assert others.log.count(ANEW) > met


def test_a_signal_ends_ranks_and_their_supervisor(split: Split) -> None:
    ranks = [split.rank(number) for number in range(2)]
    for host in split.hosts:
        host.process.send_signal(signal.SIGTERM)
    for host in split.hosts:
        assert host.process.wait(END_SECONDS) == 0
    assert psutil.wait_procs(ranks, timeout=END_SECONDS)[1] == []
