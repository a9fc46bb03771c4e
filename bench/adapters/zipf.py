"""Many registered adapters and memory for a few of them, beside a server that holds them all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from bench.adapters.adapter_files import QUERY_VALUE, flags, scratch, write
from bench.adapters.experiment import (
    RATE,
    RATIO,
    Experiment,
    compared,
    running,
    serving,
    verdict,
)
from bench.adapters.metrics import LOADS, counted
from bench.adapters.streams import NUM_STREAMS, fetch, in_turn, num_streams, requests
from bench.harness.server import RunningServer
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Table
from bench.parts.workloads import tokens_per_second

NUM_ADAPTERS, NUM_REQUESTS, OUTPUT_TOKENS = 1000, 256, 64
MEMORY_FOR = 64
GOAL = 0.85
RESIDENT, FEW = "all adapters in memory", f"memory for {MEMORY_FOR}"


def drawn(names: Sequence[str], count: int) -> list[str]:
    """`count` names by Zipf's law with exponent 1; the same each time."""
    weights = [1 / rank for rank in range(1, len(names) + 1)]
    return random.Random("zipf").choices(names, weights, k=count)


def measure(fixture: Fixture, server: RunningServer, names: Sequence[str]) -> dict[str, float]:
    """The rate of a closed loop, and the loads meanwhile for each request."""
    length = fixture.sized(OUTPUT_TOKENS, 4)
    asked = requests(fixture, names, output_tokens=length, seed="zipf")
    with running(fixture, server):
        before = counted(server)
        answers = in_turn(server, asked, num_clients=num_streams(fixture))
        loads = counted(server)[LOADS] - before[LOADS]
    return {RATE: tokens_per_second(answers), "loads a request": loads / len(asked)}


def run(fixture: Fixture, repeats: int) -> Iterator[tuple[str, Figures]]:
    with scratch() as folder, ExitStack() as stack:
        count, most = fixture.sized(NUM_ADAPTERS, 24), fixture.sized(MEMORY_FOR, 8)
        adapters = write(fixture, folder, QUERY_VALUE, count, name="a")
        names = drawn([*adapters], fixture.sized(NUM_REQUESTS, 40))
        servers = {}
        for name, limit in ((RESIDENT, count), (FEW, most)):
            given = [*flags(adapters, folder / f"cache-{limit}"), f"--max-loras={limit}"]
            servers[name] = stack.enter_context(serving(fixture, f"zipf-{limit}", *given))
            with running(fixture, servers[name]):
                fetch(fixture, servers[name], sorted(set(names)))
        yield from compared(
            fixture,
            repeats,
            [RESIDENT, FEW],
            "zipf",
            lambda name: measure(fixture, servers[name], names),
        )


def conclude(table: Table) -> Sequence[str]:
    """A line with the ratio and its goal."""
    return [f"{FEW}: {verdict(table[FEW][RATIO], GOAL)} times the tokens/s of all in memory."]


EXPERIMENT = Experiment(
    name="zipf",
    title="Many adapters, memory for a few",
    method=(
        f"{NUM_ADAPTERS} registered adapters of rank 16 on q and v; {NUM_REQUESTS} requests of 32+{OUTPUT_TOKENS}"
        f" tokens by {NUM_STREAMS} clients in a closed loop, each for an adapter drawn by Zipf's law with exponent 1."
        " Checked copies of the drawn ones are in both caches. Two servers take turns; ratios are of the same round."
    ),
    cases=(Case(RESIDENT), Case(FEW)),
    run=run,
    conclude=conclude,
)
