"""A server with adapters that no request uses, beside a server without adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from bench.adapters.adapter_files import ALL, flags, scratch, write
from bench.adapters.experiment import (
    RATE,
    RATIO,
    Experiment,
    compared,
    running,
    serving,
    verdict,
)
from bench.adapters.streams import NUM_STREAMS, decode_rate, num_streams, requests, together
from bench.harness.server import RunningServer
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Table

WITHOUT, WITH = "without adapters", "with adapters, none used"
GOAL = 0.99
NUM_ADAPTERS, OUTPUT_TOKENS = 8, 192


def rate(fixture: Fixture, server: RunningServer, name: str) -> float:
    """Tokens a second of the base model's streams."""
    length = fixture.sized(OUTPUT_TOKENS, 16)
    asked = requests(fixture, [""] * num_streams(fixture), output_tokens=length, seed=name)
    with running(fixture, server):
        return decode_rate(together(server, asked))


def run(fixture: Fixture, repeats: int) -> Iterator[tuple[str, Figures]]:
    with scratch() as folder, ExitStack() as stack:
        adapters = write(fixture, folder, ALL, NUM_ADAPTERS, name="a")
        servers = {}
        for name, given in ((WITHOUT, []), (WITH, flags(adapters, folder / "cache"))):
            servers[name] = stack.enter_context(serving(fixture, "unused", *given))
            rate(fixture, servers[name], "warm-up")

        def measure(name: str) -> Figures:
            return {RATE: rate(fixture, servers[name], "unused")}

        yield from compared(fixture, repeats, [WITHOUT, WITH], "unused", measure)


def conclude(table: Table) -> Sequence[str]:
    """A line with the ratio and its goal."""
    return [f"{WITH}: {verdict(table[WITH][RATIO], GOAL)} times the tokens/s."]


EXPERIMENT = Experiment(
    name="unused",
    title="A server with adapters that no request uses",
    method=(
        f"{NUM_STREAMS} streams of the base model, tokens a second, on two servers that take turns; one"
        f" has {NUM_ADAPTERS} registered adapters. Ratios are of the same round."
    ),
    cases=(Case(WITHOUT), Case(WITH)),
    run=run,
    conclude=conclude,
)
