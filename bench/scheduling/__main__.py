"""`python -m bench.scheduling`: a long prompt among running streams, by steps and targets of their latency.

Measured are the streams' time between tokens and the prompt's time to first token. Each case starts our launcher with
its flags. `--record` writes the table to bench/results. `--quick` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.parts import run as parts_run
from bench.parts.client import Answer, Client, Request, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part, Table
from bench.parts.workloads import gaps_within, milliseconds

NUM_STREAMS, STREAM_PROMPT_TOKENS, LONG_PROMPT_TOKENS, LONG_NEW_TOKENS = 16, 64, 4000, 16
SETTLED_TOKENS = 24
"""Tokens of each stream before the long prompt is sent."""
POLL_SECONDS = 0.01
WORST = "during it, p99, ms"

CASES = (
    Case("target 500 ms", ("--target-inter-token-latency=500",)),
    Case("default"),
    Case("steps of 512", ("--max-batch-prefill-tokens=512",)),
    Case("target 100 ms", ("--target-inter-token-latency=100",)),
    Case("target 60 ms", ("--target-inter-token-latency=60",)),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """The streams, which are cancelled at the end, and the long prompt."""

    streams: Sequence[Request]
    long: Request


def scene(fixture: Fixture) -> Scene:
    """The requests, with different prompts in each repetition."""
    long_tokens = fixture.fitting(LONG_PROMPT_TOKENS)
    seed = fixture.seed("chunking")
    streams = [
        Request(
            prompt=fixture.texts.prompt(STREAM_PROMPT_TOKENS, seed=f"{seed}/{number}"),
            prompt_tokens=STREAM_PROMPT_TOKENS,
            output_tokens=longest_answer(fixture),
        )
        for number in range(NUM_STREAMS)
    ]
    long = Request(
        prompt=fixture.texts.prompt(long_tokens, seed=f"{seed}/long"),
        prompt_tokens=long_tokens,
        output_tokens=LONG_NEW_TOKENS,
    )
    return Scene(streams, long)


def longest_answer(fixture: Fixture) -> int:
    """Tokens that a stream may get, more than it gets until it is cancelled."""
    return fixture.fitting(LONG_PROMPT_TOKENS) - STREAM_PROMPT_TOKENS


async def measure(url: str, what: Scene) -> Figures:
    """Run the streams, send the long prompt, and cancel the streams after it."""
    async with Client(url) as client:
        streams = [Answer(request, time.perf_counter()) for request in what.streams]
        tasks = [asyncio.create_task(client.send(stream)) for stream in streams]
        while not all(len(s.arrivals) >= SETTLED_TOKENS or s.error for s in streams):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        long = Answer(what.long, time.perf_counter())
        await client.send(long)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    succeeded([long, *streams])
    return figures(streams, long)


def figures(streams: Sequence[Answer], long: Answer) -> Figures:
    """Time between tokens before the long prompt and until its first token, and its TTFT."""
    settled = [s.arrivals[SETTLED_TOKENS // 2] for s in streams]
    before = [g for s in streams for g in gaps_within(s.arrivals, max(settled), long.due)]
    during = [g for s in streams for g in gaps_within(s.arrivals, long.due, long.arrivals[0])]
    p50, p99, worst = milliseconds(during, 0.5, 0.99, 1.0)
    return {
        "between tokens before, p50, ms": milliseconds(before, 0.5)[0],
        "during it, p50, ms": p50,
        WORST: p99,
        "longest, ms": worst,
        "its TTFT, ms": 1000 * long.first_token_seconds,
    }


def run(fixture: Fixture, case: Case) -> Figures:
    longest = fixture.fitting(LONG_PROMPT_TOKENS)
    limits = (
        f"--max-input-tokens={longest}",
        f"--max-total-tokens={longest + LONG_NEW_TOKENS}",
        "--max-batch-prefill-tokens=4096",
    )
    names = {flag.partition("=")[0] for flag in case.flags}
    kept = [flag for flag in limits if flag.partition("=")[0] not in names]
    with fixture.serving(*kept, *case.flags) as server:
        return asyncio.run(measure(server.url, scene(fixture)))


def conclude(table: Table) -> Sequence[str]:
    """Compare each case with the first, in which steps are as long as they may be."""
    whole = table[CASES[0].name]
    lines = []
    for case in CASES[1:]:
        better = whole[WORST].median / table[case.name][WORST].median
        dearer = table[case.name]["its TTFT, ms"].median / whole["its TTFT, ms"].median
        lines.append(
            f"{case.name}: p99 between tokens {better:.1f} times shorter than with half a second, for a first token of"
            f" the long prompt after {dearer:.2f} times as long."
        )
    return lines


PART = Part(
    name="chunking",
    title="A long prompt among running streams",
    method=(
        f"{NUM_STREAMS} streams run; then a prompt of 4 000 tokens arrives (three quarters of the"
        " positions where a model has fewer). Time between tokens of the streams just before, and from"
        " its arrival to its first token. By default a step with the prompt takes as long as three"
        " without; a target replaces that limit, and `--max-batch-prefill-tokens` may shorten steps further."
    ),
    cases=CASES,
    run=run,
    conclude=conclude,
)
PARTS = {PART.name: PART}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    return parts_run.parse_arguments("scheduling", __doc__, PARTS, arguments, model="135m")


def main() -> int:
    """Exit code 1 when a case could not be measured."""
    return parts_run.run_parts("scheduling", PARTS, parse_arguments(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
