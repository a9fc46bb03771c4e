"""Mixed batches beside PEFT on `transformers` and, where it is installed, vLLM's CPU build."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.adapters.adapter_files import ALL, flags, scratch, write
from bench.adapters.experiment import (
    RATE,
    RATIO,
    Experiment,
    measured,
    rounds,
    running,
    serving,
    verdict,
)
from bench.adapters.streams import (
    NUM_STREAMS,
    PROMPT_TOKENS,
    fetch,
    num_streams,
    requests,
    together,
)
from bench.harness.command_line import say
from bench.harness.machine import CpuMeter
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Table
from bench.parts.workloads import tokens_per_second
from bench.peers.engines import OFFLINE, OURS, Offline, as_it_is
from bench.peers.process import EngineError, EngineProcess
from bench.peers.worker import Limits, Request
from millrace_launcher.host.threads import usable_cores

PEFT = Offline(
    name="transformers and PEFT",
    module="bench.peers.peft_generate",
    python=Path(sys.executable),
    environment=dict,
    convert=as_it_is,
)
PEERS = (PEFT, *(engine for engine in OFFLINE if engine.name == "vllm"))
COUNTS = (8, NUM_STREAMS)
OUTPUT_TOKENS = 64
GOAL = 5
LEAST_ID, MOST_ID = 300, 1000
"""Token ids of prompts, which any checkpoint of ours has."""
Rate = Callable[[int], float]
"""Measures tokens a second with so many adapters."""


def case_name(engine: str, count: int) -> str:
    """The name of the case in which `engine` has `count` adapters."""
    return f"{engine}, {count} adapters"


def ours(fixture: Fixture, adapters: Mapping[str, Path], cache: Path, stack: ExitStack) -> Rate:
    """Our server, with all adapters in memory."""
    server = stack.enter_context(serving(fixture, "peers", *flags(adapters, cache)))
    fetch(fixture, server, [*adapters])

    def rate(count: int) -> float:
        names = _spread(fixture, [*adapters], count)
        asked = requests(fixture, names, output_tokens=length_of(fixture), seed=f"peers/{count}")
        with running(fixture, server):
            return tokens_per_second(together(server, asked))

    rate(NUM_STREAMS)
    return rate


def peer(fixture: Fixture, engine: EngineProcess, folders: Sequence[Path]) -> Rate:
    """A peer without HTTP, its model and adapters loaded; raises EngineError."""
    length = length_of(fixture)
    most = PROMPT_TOKENS + length
    limits = Limits(
        max_streams=NUM_STREAMS,
        max_tokens=most,
        kv_tokens=NUM_STREAMS * most,
        threads=usable_cores(),
        max_adapters=NUM_STREAMS,
    )
    engine.load(fixture.model.absolute(), limits)

    def run(count: int, new_tokens: int) -> float:
        adapters = _spread(fixture, [str(folder) for folder in folders], count)
        meter = CpuMeter(engine.processes)
        timelines = engine.run(asked_of_peer(adapters, new_tokens), NUM_STREAMS)
        fixture.other_cores = meter.stop().other_cores
        seconds = max(t.arrivals[-1] for t in timelines) - min(t.due for t in timelines)
        return len(adapters) * new_tokens / seconds

    run(NUM_STREAMS, 2)
    return lambda count: run(count, length)


def asked_of_peer(adapters: Sequence[str], new_tokens: int) -> list[Request]:
    """Requests of random token ids, one for each adapter; the same each time."""
    drawing = random.Random("prompts")
    return [
        Request(
            [drawing.randint(LEAST_ID, MOST_ID) for _ in range(PROMPT_TOKENS)], new_tokens, adapter
        )
        for adapter in adapters
    ]


def length_of(fixture: Fixture) -> int:
    """Output tokens of a request."""
    return fixture.sized(OUTPUT_TOKENS, 4)


def run(fixture: Fixture, repeats: int) -> Iterator[tuple[str, Figures]]:
    with scratch() as folder, ExitStack() as stack:
        adapters = write(fixture, folder, ALL, NUM_STREAMS, name="a")
        contenders = {OURS: ours(fixture, adapters, folder / "cache", stack)}
        for each in PEERS[:1] if fixture.quick else PEERS:
            if not each.is_installed:
                continue
            engine = each.start(log=fixture.out / f"adapters-{each.name.split()[0]}.log")
            stack.callback(engine.end)
            try:
                contenders[each.name] = peer(fixture, engine, [*adapters.values()])
            except EngineError as error:
                say(f"{each.name} takes no part: {error}")
        for order in rounds(fixture, repeats, [*contenders], "peers"):
            for count in COUNTS[:1] if fixture.quick else COUNTS:
                yield from _compared(fixture, contenders, order, count)


def _compared(
    fixture: Fixture, contenders: Mapping[str, Rate], order: Sequence[str], count: int
) -> Iterator[tuple[str, Figures]]:
    """The rate of each engine with `count` adapters, and the ratio of our rate to it."""
    found = measured(fixture, order, lambda name: contenders[name](count))
    for name, rate in found.items():
        yield case_name(name, count), {RATE: rate, RATIO: found[OURS] / rate}


def _spread(fixture: Fixture, adapters: Sequence[str], count: int) -> list[str]:
    """The adapter of each stream: the first `count` adapters in turn."""
    return [adapters[number % count] for number in range(num_streams(fixture))]


def conclude(table: Table) -> Sequence[str]:
    """Our rate over each peer's."""
    lines = []
    for count in COUNTS:
        for engine in PEERS:
            row = table.get(case_name(engine.name, count))
            if row is not None and engine is PEFT:
                lines.append(f"{count} adapters: {verdict(row[RATIO], GOAL)} times {engine.name}.")
            elif row is not None:
                lines.append(f"{count} adapters: {row[RATIO].text} times {engine.name}.")
    return lines


EXPERIMENT = Experiment(
    name="peers",
    title="Adapters mixed in one batch beside peers",
    method=(
        f"{NUM_STREAMS} requests of {PROMPT_TOKENS}+{OUTPUT_TOKENS} tokens at once; adapters of rank 16 on all seven"
        " projections are shared by the requests in turn, and are all in memory. Output tokens from the first request"
        " to the last token, ours over HTTP and peers without. `transformers` is `generate` with `adapter_names` in"
        " bfloat16. The ratio is our rate over that of the row, in the same round."
    ),
    cases=tuple(
        Case(case_name(name, count))
        for count in COUNTS
        for name in (OURS, *(engine.name for engine in PEERS))
    ),
    run=run,
    conclude=conclude,
)
