"""Streams with one adapter, with an adapter each, and of the base model, on one server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench.adapters.adapter_files import ALL, QUERY_VALUE, flags, scratch, write
from bench.adapters.experiment import (
    RATE,
    RATIO,
    Experiment,
    compared,
    running,
    serving,
)
from bench.adapters.streams import NUM_STREAMS, decode_rate, fetch, num_streams, requests, together
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Table

BASE, ONE = "base", "one adapter"
QV, EACH = f"{NUM_STREAMS} adapters, q and v", f"{NUM_STREAMS} adapters"
GOALS: Mapping[str, tuple[float, float]] = {ONE: (0.95, 0.96), QV: (0.90, 0.93), EACH: (0.80, 0.85)}
"""Ratios at 135M and at 1B."""
OUTPUT_TOKENS = 192


def run(fixture: Fixture, repeats: int) -> Iterator[tuple[str, Figures]]:
    with scratch() as folder:
        count = num_streams(fixture)
        wide = write(fixture, folder, ALL, count, name="wide")
        narrow = write(fixture, folder, QUERY_VALUE, count, name="narrow")
        cases = {BASE: [""] * count, ONE: [next(iter(wide))] * count}
        cases |= {QV: [*narrow], EACH: [*wide]}
        with serving(fixture, "mixed", *flags(wide | narrow, folder / "cache")) as server:
            fetch(fixture, server, [*wide, *narrow])

            def measure(name: str) -> Figures:
                length = fixture.sized(OUTPUT_TOKENS, 16)
                asked = requests(fixture, cases[name], output_tokens=length, seed="mixed")
                with running(fixture, server):
                    return {RATE: decode_rate(together(server, asked))}

            yield from compared(fixture, repeats, [*cases], "mixed", measure)


def conclude(table: Table) -> Sequence[str]:
    """A line for each case with its ratio and the goals of both shapes."""
    return [
        f"{name}: {table[name][RATIO].text} times the base's tokens/s (goal {small:g} at 135M, {large:g} at 1B)."
        for name, (small, large) in GOALS.items()
    ]


EXPERIMENT = Experiment(
    name="mixed",
    title="Adapters mixed in one batch",
    method=(
        f"{NUM_STREAMS} streams, tokens a second, on one server with all adapters in memory. Adapters"
        " have rank 16 on all seven projections, or on q and v. Ratios are to the base model in the same round."
    ),
    cases=tuple(map(Case, (BASE, ONE, QV, EACH))),
    run=run,
    conclude=conclude,
)
