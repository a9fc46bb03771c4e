"""The memory that registered adapters take, and that names which nobody registered leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import aiohttp
import psutil

from bench.adapters.adapter_files import QUERY_VALUE, flags, scratch, write
from bench.adapters.experiment import Experiment, serving, verdict
from bench.adapters.names import Names
from bench.harness.command_line import say
from bench.harness.server import RunningServer
from bench.parts.client import RequestsFailed
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Table

MEGABYTE = 1e6
NUM_REGISTERED, NUM_ASKED, NUM_IN_PROCESS = 10_000, 20_000, 1_000_000
WARM_UP = 10
"""The names asked before the memory is read, as a part of all."""
NUM_CLIENTS = 16
FEW, MANY = "1 registered", "many registered"
HTTP, IN_PROCESS = "made-up names over HTTP", "made-up names in the process"
ROUTER, SHARD = "router, MB", "shard, MB"
ROUTER_MORE, SHARD_MORE = "router, MB more", "shard, MB more"
GOAL_MB = 50


def memory(server: RunningServer) -> dict[str, float]:
    """Resident memory of router and shard."""
    found = {ROUTER: 0.0, SHARD: 0.0}
    for process in server.processes():
        command = process.cmdline()
        title = ROUTER if "millrace_router" in command else SHARD if "serve" in command else ""
        if title:
            found[title] += resident(process)
    return found


def resident(process: psutil.Process) -> float:
    """The resident memory of a process in megabytes."""
    return float(process.memory_info().rss / MEGABYTE)


async def ask(server: RunningServer, names: Sequence[str]) -> None:
    """Ask for adapters that do not exist; raises RequestsFailed for an answer other than 404."""
    left = iter(names)

    async def client(session: aiohttp.ClientSession) -> None:
        for name in left:
            body = {"inputs": "a", "parameters": {"max_new_tokens": 1, "adapter_id": name}}
            async with session.post("/generate", json=body) as response:
                await response.read()
                if response.status != 404:
                    raise RequestsFailed(f"{name}: status {response.status}")

    async with aiohttp.ClientSession(base_url=server.url) as session, asyncio.TaskGroup() as tasks:
        for _ in range(NUM_CLIENTS):
            tasks.create_task(client(session))


def run(fixture: Fixture, repeats: int) -> Iterator[tuple[str, Figures]]:
    many = fixture.sized(NUM_REGISTERED, 100)
    for number in range(repeats):
        say(f"registered: round {number + 1} of {repeats}")
        with scratch() as folder:
            (path,) = write(fixture, folder, QUERY_VALUE, 1, name="a").values()
            with serving(fixture, "registered", *flags({"a": path}, folder / "cache")) as server:
                few = memory(server)
            yield FEW, few
            # They differ by their folders, which are empty: none is used.
            adapters = {f"adapter-{each}": folder / f"adapter-{each}" for each in range(many)}
            with serving(fixture, "registered", *flags(adapters, folder / "cache")) as server:
                found = memory(server)
                yield MANY, found | _more(few, found)
                yield HTTP, asked_over_http(fixture, server)
        yield IN_PROCESS, asked_in_process(fixture, many)


def asked_over_http(fixture: Fixture, server: RunningServer) -> Figures:
    """The growth of memory while unknown names are asked for, after a first part that fills the caches."""
    names = [f"made-up-{each}" for each in range(fixture.sized(NUM_ASKED, 200))]
    first = len(names) // WARM_UP
    asyncio.run(ask(server, names[:first]))
    before = memory(server)
    asyncio.run(ask(server, names[first:]))
    after = memory(server)
    return after | _more(before, after)


def asked_in_process(fixture: Fixture, num_registered: int) -> Figures:
    """The memory that the names of registered adapters take in this process, and the growth by unknown names."""
    process, count = psutil.Process(), fixture.sized(NUM_IN_PROCESS, 2000)
    empty = resident(process)
    names = Names(num_registered)
    full = resident(process)
    asyncio.run(names.ask(0, count // WARM_UP))
    before = resident(process)
    asyncio.run(names.ask(count // WARM_UP, count))
    return {"registered and used, MB": full - empty, ROUTER_MORE: resident(process) - before}


def _more(before: Figures, after: Figures) -> dict[str, float]:
    return {ROUTER_MORE: after[ROUTER] - before[ROUTER], SHARD_MORE: after[SHARD] - before[SHARD]}


def conclude(table: Table) -> Sequence[str]:
    """Lines with the growth of memory and its goal."""
    row = table[MANY]
    return [
        f"Registered adapters: the router has {verdict(row[ROUTER_MORE], GOAL_MB, at_least=False)} MB more, the shard"
        f" {row[SHARD_MORE].text}.",
        f"Made-up names: the router grows by {table[HTTP][ROUTER_MORE].text} MB over HTTP, and by"
        f" {table[IN_PROCESS][ROUTER_MORE].text} MB in the process.",
    ]


EXPERIMENT = Experiment(
    name="registered",
    title="Memory of registered adapters and of made-up names",
    method=(
        f"Resident memory of a server with 1 and with {NUM_REGISTERED} registered adapters, then its growth while"
        f" {NUM_ASKED} made-up names are asked for over HTTP; the growth of the router's own names in one process while"
        f" {NUM_IN_PROCESS} are asked for: words, ids that the hub does not have, and digests of registered adapters."
        f" Growth counts from the first {100 / WARM_UP:.0f} % on, since caches of bounded size fill first."
    ),
    cases=tuple(map(Case, (FEW, MANY, HTTP, IN_PROCESS))),
    run=run,
    conclude=conclude,
)
