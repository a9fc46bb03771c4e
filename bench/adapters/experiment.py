"""An experiment: cases that are measured in turn, round by round, on servers that live through all rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from bench.harness.command_line import say
from bench.harness.machine import CpuMeter
from bench.harness.quiet import wait_until_quiet
from bench.harness.repeats import Repeated, Sample
from bench.harness.server import RunningServer
from bench.harness.server import serving as launched
from bench.parts.fixture import MANY, Fixture
from bench.parts.part import Figures, Question, Samples, Table, table_of

RATE, RATIO = "tokens/s", "ratio"
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Question):
    """A question whose cases are compared within each round."""

    run: Callable[[Fixture, int], Iterator[tuple[str, Figures]]]
    """Yields the name and the figures of each case that was measured, in so many rounds."""

    def measure(self, fixture: Fixture, *, repeats: int) -> Table:
        """`repeats` rounds of all cases. Raises ServerError, RequestsFailed or EngineError."""
        samples: Samples = {case.name: {} for case in self.cases}
        for name, figures in self.run(fixture, repeats):
            for title, value in figures.items():
                sample = Sample(value, fixture.other_cores)
                samples[name].setdefault(title, []).append(sample)
        return table_of({name: row for name, row in samples.items() if row})


def rounds(
    fixture: Fixture, repeats: int, cases: Sequence[str], name: str
) -> Iterator[Sequence[str]]:
    """The cases in the order of each round, which turns round by round."""
    for number in range(repeats):
        fixture.repeat = number
        if not fixture.quick:
            wait_until_quiet(fixture.quiet)
        say(f"{name}: round {number + 1} of {repeats}")
        yield cases if number % 2 == 0 else cases[::-1]


def measured(
    fixture: Fixture, order: Sequence[str], measure: Callable[[str], Found]
) -> dict[str, Found]:
    """What `measure` finds for each case of one round; the most of other processes' CPU counts for all of them."""
    found, others = {}, 0.0
    for name in order:
        found[name] = measure(name)
        others = max(others, fixture.other_cores)
    fixture.other_cores = others
    return found


def compared(
    fixture: Fixture,
    repeats: int,
    cases: Sequence[str],
    name: str,
    measure: Callable[[str], Figures],
) -> Iterator[tuple[str, Figures]]:
    """The figures of all cases round by round, each with the ratio of its rate to that of the first case."""
    for order in rounds(fixture, repeats, cases, name):
        yield from with_ratio(measured(fixture, order, measure), cases[0])


def with_ratio(found: Mapping[str, Figures], base: str) -> Iterator[tuple[str, Figures]]:
    """The figures of one round, each with the ratio of its rate to that of the case `base`."""
    for name, figures in found.items():
        yield name, {**figures, RATIO: figures[RATE] / found[base][RATE]}


@contextmanager
def serving(fixture: Fixture, name: str, *flags: str) -> Iterator[RunningServer]:
    """Our launcher for the length of the block; raises ServerError."""
    log = fixture.out / f"adapters-{name}.log"
    every = ["--max-batch-size=64", f"--max-concurrent-requests={MANY}", *flags, *fixture.flags]
    with launched(fixture.model, log=log, flags=every) as server:
        yield server


@contextmanager
def running(fixture: Fixture, server: RunningServer) -> Iterator[None]:
    """Let a server run for the block alone, and record the CPU that other processes use meanwhile."""
    server.family.thaw()
    meter = CpuMeter(server.processes)
    try:
        yield
    finally:
        fixture.other_cores = meter.stop().other_cores
        server.family.freeze()


def verdict(figure: Repeated, goal: float, *, at_least: bool = True) -> str:
    """The figure, its goal, and whether it is met."""
    met = figure.median >= goal if at_least else figure.median <= goal
    words = "at least" if at_least else "at most"
    return f"{figure.text} (goal {words} {goal:g}: {'met' if met else 'missed'})"
