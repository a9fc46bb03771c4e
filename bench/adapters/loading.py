"""Loads from the disk cache while streams of the base model run: their time, and the streams' gaps."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

from bench.adapters.adapter_files import ALL, flags, scratch, write
from bench.adapters.experiment import Experiment, measured, rounds, running, serving, verdict
from bench.adapters.metrics import LOAD_SECONDS, LOADS, counted
from bench.adapters.streams import NUM_STREAMS, fetch, gaps, num_streams, requests
from bench.harness.server import RunningServer
from bench.parts.client import Answer, Client, Request, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Table
from bench.parts.workloads import milliseconds

NOTHING, RESIDENT = "no other request", "an adapter in memory"
LOADING = "a load for each request"
CASES = (NOTHING, RESIDENT, LOADING)
NUM_ADAPTERS, MEMORY_FOR = 24, 8
OUTPUT_TOKENS = 256
PAUSE_SECONDS = 0.25
POLL_SECONDS = 0.005
GAP, GAP_RATIO, GAP_OVER_RESIDENT = "p99 gap, ms", "p99 ratio", "p99 over resident"
MEAN_LOAD = "a load, ms"
GAP_GOAL, LOAD_GOAL_MS = 1.15, 100


class Beside:
    """Requests of one token, one after the other, each with a pause after its answer."""

    def __init__(self, fixture: Fixture, client: Client, adapters: Iterator[str]) -> None:
        self._fixture, self._client, self._adapters = fixture, client, adapters
        self.answers: list[Answer] = []

    async def run(self, streams: Sequence[Answer]) -> None:
        """Send requests from the time at which all streams have a token until the first stream ends."""
        while not all(stream.arrivals for stream in streams):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        for adapter in self._adapters:
            if any(stream.ended for stream in streams):
                break
            (asked,) = requests(
                self._fixture,
                [adapter],
                output_tokens=1,
                prompt_tokens=self._fixture.texts.num_special + 1,
                seed=f"beside/{len(self.answers)}",
            )
            self.answers.append(Answer(asked, time.perf_counter()))
            await self._client.send(self.answers[-1])
            await asyncio.sleep(PAUSE_SECONDS)


async def gaps_beside(
    fixture: Fixture, server: RunningServer, streams: Sequence[Request], adapters: Iterator[str]
) -> list[float]:
    """Seconds between tokens while all streams run beside requests for `adapters`."""
    async with Client(server.url) as client:
        answers = [Answer(stream, time.perf_counter()) for stream in streams]
        beside = Beside(fixture, client, adapters)
        async with asyncio.TaskGroup() as tasks:
            for answer in answers:
                tasks.create_task(client.send(answer))
            tasks.create_task(beside.run(answers))
    succeeded([*answers, *beside.answers])
    return gaps(answers)


def measure(
    fixture: Fixture, server: RunningServer, name: str, adapters: Iterator[str]
) -> dict[str, float]:
    """The gaps, and the mean time of the loads meanwhile."""
    streams = requests(fixture, [""] * num_streams(fixture), output_tokens=OUTPUT_TOKENS, seed=name)
    with running(fixture, server):
        before = counted(server)
        found = asyncio.run(gaps_beside(fixture, server, streams, adapters))
        after = counted(server)
    p50, p99 = milliseconds(found, 0.5, 0.99)
    figures = {"p50 gap, ms": p50, GAP: p99}
    loads = after[LOADS] - before[LOADS]
    if loads:
        seconds = after[LOAD_SECONDS] - before[LOAD_SECONDS]
        figures |= {"loads": loads, MEAN_LOAD: 1000 * seconds / loads}
    return figures


def run(fixture: Fixture, repeats: int) -> Iterator[tuple[str, Figures]]:
    with scratch() as folder:
        count = fixture.sized(NUM_ADAPTERS, 6)
        adapters = write(fixture, folder, ALL, count, name="a")
        most = f"--max-loras={fixture.sized(MEMORY_FOR, 2)}"
        with serving(fixture, "loading", most, *flags(adapters, folder / "cache")) as server:
            fetch(fixture, server, [*adapters])
            *loaded, resident = adapters
            asked: dict[str, Iterator[str]] = {
                NOTHING: iter(()),
                RESIDENT: itertools.repeat(resident),
                LOADING: itertools.cycle(loaded),
            }

            def one(name: str) -> Figures:
                with running(fixture, server):
                    fetch(fixture, server, [resident])
                return measure(fixture, server, name, asked[name])

            for order in rounds(fixture, repeats, CASES, "loading"):
                yield from with_ratios(measured(fixture, order, one))


def with_ratios(found: Mapping[str, Figures]) -> Iterator[tuple[str, Figures]]:
    """The figures of one round with the ratios of their gaps."""
    for name, figures in found.items():
        ratios = {GAP_RATIO: figures[GAP] / found[NOTHING][GAP]}
        if name == LOADING:
            ratios[GAP_OVER_RESIDENT] = figures[GAP] / found[RESIDENT][GAP]
        yield name, {**figures, **ratios}


def conclude(table: Table) -> Sequence[str]:
    """Lines with the time of a load, the gaps, and their goals."""
    row = table[LOADING]
    return [
        f"A load takes {verdict(row[MEAN_LOAD], LOAD_GOAL_MS, at_least=False)} ms.",
        f"The streams' p99 gap is {verdict(row[GAP_RATIO], GAP_GOAL, at_least=False)} times that without requests, and"
        f" {row[GAP_OVER_RESIDENT].text} times that beside requests without loads.",
    ]


EXPERIMENT = Experiment(
    name="loading",
    title="Loads beside running streams",
    method=(
        f"{NUM_STREAMS} streams of the base model run; beside them requests of one token come one after the other, with"
        f" pauses of {1000 * PAUSE_SECONDS:.0f} ms, for an adapter in memory, or each for one that has to be loaded"
        " from the disk cache. Adapters have rank 16 on all seven projections. Gaps between the streams' tokens;"
        " ratios are of the same round."
    ),
    cases=tuple(map(Case, CASES)),
    run=run,
    conclude=conclude,
)
