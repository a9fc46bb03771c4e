"""`python -m bench.adapters`: streams with one LoRA adapter, with an adapter each, and without, on one server.

The cases take turns, round by round, in an order that alternates. `--record` writes the table to bench/results.
`--quick` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.command_line import say
from bench.harness.machine import CpuMeter
from bench.harness.quiet import wait_until_quiet
from bench.harness.repeats import Sample
from bench.harness.server import RunningServer, serving
from bench.parts import run
from bench.parts.client import Answer, Client, Request, closed_loop, open_loop, succeeded
from bench.parts.fixture import MANY, Fixture
from bench.parts.part import Case, Question, Samples, Table, table_of
from millrace.verify.adapter_files import linears, write_adapter

RANK = 16
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUERY_VALUE = ("q_proj", "v_proj")
"""The modules that PEFT targets by default."""
NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32, 192
RATE, RATIO = "tokens/s", "ratio"
BASE, ONE = "base", "one adapter"
QV, EACH = f"{NUM_STREAMS} adapters, q and v", f"{NUM_STREAMS} adapters"
GOALS: Mapping[str, tuple[float, float]] = {ONE: (0.95, 0.96), QV: (0.90, 0.93), EACH: (0.80, 0.85)}
"""Ratios at 135M and at 1B."""


def write(
    fixture: Fixture, folder: Path, targets: Sequence[str], count: int, *, name: str
) -> dict[str, Path]:
    """Write `count` adapters with different weights; their folders by name."""
    shapes = {
        module: shape
        for module, shape in linears(fixture.model).items()
        if module.rpartition(".")[2] in targets
    }
    names = [f"{name}-{number}" for number in range(count)]
    return {each: write_adapter(folder / each, shapes, rank=RANK) for each in names}


def flags(adapters: Mapping[str, Path], cache: Path) -> list[str]:
    """Register the adapters of a server whose checked copies are in `cache`, all of which fit into memory."""
    modules = [f"--lora-modules={name}={path}" for name, path in adapters.items()]
    return [f"--adapter-cache={cache}", "--adapter-memory=4GiB", *modules]


def requests(fixture: Fixture, adapters: Sequence[str], *, output_tokens: int) -> list[Request]:
    """A request with its own prompt for each of `adapters`; an empty name is the base model."""
    return [
        Request(
            prompt=fixture.texts.prompt(PROMPT_TOKENS, seed=f"{fixture.seed('mixed')}/{number}"),
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=output_tokens,
            adapter=adapter,
        )
        for number, adapter in enumerate(adapters)
    ]


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens a second from the first token on, which is not counted; streams begin together and have one length."""
    begin = min(answer.arrivals[0] for answer in answers)
    end = max(answer.arrivals[-1] for answer in answers)
    return (sum(answer.num_tokens for answer in answers) - 1) / (end - begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(Question):
    """Cases that are compared within each round."""

    def measure(self, fixture: Fixture, *, repeats: int) -> Table:
        """`repeats` rounds of all cases. Raises ServerError or RequestsFailed."""
        with tempfile.TemporaryDirectory(prefix="millrace-adapters-") as scratch:
            folder, count = Path(scratch), fixture.sized(NUM_STREAMS, 4)
            wide = write(fixture, folder, ALL, count, name="wide")
            narrow = write(fixture, folder, QUERY_VALUE, count, name="narrow")
            names = {BASE: [""] * count, ONE: [next(iter(wide))] * count}
            names |= {QV: [*narrow], EACH: [*wide]}
            limits = ["--max-batch-size=64", f"--max-concurrent-requests={MANY}"]
            registered = flags(wide | narrow, folder / "cache")
            log = fixture.out / "adapters.log"
            with serving(
                fixture.model, log=log, flags=[*limits, *registered, *fixture.flags]
            ) as server:
                fetch = requests(fixture, [*wide, *narrow], output_tokens=1)
                asyncio.run(_answers(server, fetch, num_clients=4))
                return self.rounds(fixture, server, names, repeats)

    def rounds(
        self,
        fixture: Fixture,
        server: RunningServer,
        names: Mapping[str, Sequence[str]],
        repeats: int,
    ) -> Table:
        """Rates, and their ratios to the base's rate in the same round; the disturbance of a round is its worst."""
        samples: Samples = {name: {RATE: [], RATIO: []} for name in names}
        for number in range(repeats):
            fixture.repeat = number
            if not fixture.quick:
                wait_until_quiet(fixture.quiet)
            say(f"{self.name}: round {number + 1} of {repeats}")
            meter, rates = CpuMeter(server.processes), {}
            for name in [*names][:: -1 if number % 2 else 1]:
                asked = requests(
                    fixture, names[name], output_tokens=fixture.sized(OUTPUT_TOKENS, 16)
                )
                rates[name] = decode_rate(asyncio.run(_answers(server, asked)))
            others = meter.stop().other_cores
            for name, rate in rates.items():
                samples[name][RATE].append(Sample(rate, others))
                samples[name][RATIO].append(Sample(rate / rates[BASE], others))
        return table_of(samples)


async def _answers(
    server: RunningServer, asked: Sequence[Request], *, num_clients: int = 0
) -> Sequence[Answer]:
    """Answers to requests that are sent all at once, or by `num_clients` in turn; raises RequestsFailed."""
    async with Client(server.url) as client:
        if num_clients:
            return succeeded(await closed_loop(client, asked, num_clients=num_clients))
        return succeeded(await open_loop(client, asked))


def conclude(table: Table) -> Sequence[str]:
    """A line for each case with its ratio and the goals of both shapes."""
    return [
        f"{name}: {table[name][RATIO].text} times the base's tokens/s (goal {small:g} at 135M, {large:g} at 1B)."
        for name, (small, large) in GOALS.items()
    ]


MIXED = Mixed(
    name="mixed",
    title="Adapters mixed in one batch",
    method=(
        f"{NUM_STREAMS} streams, tokens a second, on one server with all adapters in memory. Adapters have rank"
        f" {RANK} on all seven projections, or on q and v. Ratios are to the base model in the same round."
    ),
    cases=tuple(map(Case, (BASE, ONE, QV, EACH))),
    conclude=conclude,
)
PARTS = {MIXED.name: MIXED}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    return run.parse_arguments("adapters", __doc__, PARTS, arguments, model="135m", repeats=5)


def main() -> int:
    """Exit code 1 when the cases could not be measured."""
    return run.run_parts("adapters", PARTS, parse_arguments(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
