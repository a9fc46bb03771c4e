"""The latency of plain streams beside large grammars, and beside grammars that exhaust the compiler's limits."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, repeat

import aiohttp

from bench.parts.client import Answer, Client, Request, RequestsFailed, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Table
from bench.parts.workloads import milliseconds
from bench.structured_output import large_grammars
from bench.structured_output.batch_composition import (
    MEAN,
    MEDIAN,
    SETTLED_TOKENS,
    WORST,
    InTurn,
    Turn,
    ratios,
)
from bench.structured_output.large_grammars import (
    NEW_TOKENS,
    NUM_BYTES,
    TOOLS_BYTES,
    LargeRequest,
    request_of_little,
)
from bench.structured_output.workloads import PROMPT_TOKENS, request
from millrace.load.load import READ_TIMEOUT_SECONDS
from millrace.load.measurement import quantile

NUM_STREAMS, NUM_CLIENTS = 8, 2
STREAM_TOKENS = 768
LONGEST = "longest, ms"
ORDERLY = (200, 422, 429)
UNTIL, READ = "until answered, s", "read, ms"
LITTLE, LONGEST_LITTLE = "small schema answered, ms", "small schema at most, ms"
LITTLE_SECONDS = 0.2
NOTHING, AGAIN = Case("nothing"), Case("nothing again")
WIDE, DEEP = Case("wide schemas"), Case("deep schemas")
TOOLS, PATHOLOGICAL = Case("tools"), Case("pathological schemas")
CASES = (NOTHING, WIDE, DEEP, TOOLS, PATHOLOGICAL, AGAIN)
ROUND_FIGURES = {MEAN: "in the mean", WORST: "at p99", LONGEST: "at most"}
"""Figures of the time between tokens, with their words."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request with a large grammar."""

    status: int
    """0 for no answer."""
    seconds: float
    text: str


def larges() -> Mapping[str, LargeRequest]:
    """The large requests, by the name of the case."""
    return {
        WIDE.name: large_grammars.request_of_schema(large_grammars.wide()),
        DEEP.name: large_grammars.request_of_schema(large_grammars.deep()),
        TOOLS.name: large_grammars.request_of_tools(large_grammars.tools()),
        PATHOLOGICAL.name: large_grammars.request_of_schema(large_grammars.pathological()),
    }


def rounds(fixture: Fixture, url: str, number: int) -> list[Turn]:
    """Every case once, in another order each time."""
    place = number % len(CASES)
    sent, turn = larges(), {}
    for case in CASES[place:] + CASES[:place]:
        large = sent.get(case.name)
        read = {} if large is None else {READ: 1000 * seconds_to_read(large)}
        seen = asyncio.run(beside(url, streams(fixture, f"{number}/{case.name}"), large, number))
        turn[case.name] = {**seen, **read}
    return [turn]


def streams(fixture: Fixture, seed: str) -> list[Request]:
    """Plain requests of the same length."""
    output_tokens = fixture.fitting(fixture.sized(STREAM_TOKENS, 64))
    return [
        request(fixture, f"{seed}/{stream}", output_tokens=output_tokens, has_grammar=False)
        for stream in range(NUM_STREAMS)
    ]


def seconds_to_read(large: LargeRequest) -> float:
    """Seconds in which this process reads the grammar."""
    # As in the router: collections pass over what was there before.
    gc.freeze()
    started = time.perf_counter()
    large.read()
    seconds = time.perf_counter() - started
    gc.unfreeze()
    return seconds


async def beside(
    url: str, plain: Sequence[Request], large: LargeRequest | None, number: int
) -> Figures:
    """Figures of the plain streams while clients send `large` repeatedly, and of those clients.

    `number` makes the grammars differ from those of other rounds. Raises RequestsFailed.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_SECONDS)
    numbers, replies = count(), list[Reply]()
    async with Client(url) as client, aiohttp.ClientSession(url, timeout=timeout) as session:
        streaming = asyncio.create_task(open_loop(client, plain))
        little, littles = request_of_little(), list[Reply]()

        async def send_little() -> None:
            while not streaming.done():
                body = little.numbered(f"n{number}_{next(numbers)}")
                littles.append(await reply_to(session, little.path, body))
                await asyncio.wait([streaming], timeout=LITTLE_SECONDS)

        async def send(large: LargeRequest) -> None:
            while not streaming.done():
                body = large.numbered(f"n{number}_{next(numbers)}")
                replies.append(await reply_to(session, large.path, body))

        clients = map(send, repeat(large, NUM_CLIENTS)) if large is not None else ()
        await asyncio.gather(send_little(), *clients)
        answers = await streaming
    waited = [reply.seconds for reply in littles]
    return {
        **gap_figures(succeeded(answers)),
        LITTLE: 1000 * statistics.median(waited),
        LONGEST_LITTLE: 1000 * max(waited),
        **reply_figures(replies),
    }


async def reply_to(session: aiohttp.ClientSession, path: str, body: bytes) -> Reply:
    """Post a body, and wait for the answer."""
    started = time.perf_counter()
    headers = {"content-type": "application/json"}
    try:
        async with session.post(path, data=body, headers=headers) as response:
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        status, text = 0, f"{type(error).__name__}: {error}"
    return Reply(status, time.perf_counter() - started, text)


def gap_figures(answers: Sequence[Answer]) -> Figures:
    """Time between tokens of all streams, without the first tokens of each."""
    settled = (answer.arrivals[SETTLED_TOKENS:] for answer in answers)
    gaps = [after - before for arrivals in settled for before, after in pairwise(arrivals)]
    median, worst, longest = milliseconds(gaps, 0.5, 0.99, 1.0)
    return {
        MEAN: 1000 * statistics.fmean(gaps),
        MEDIAN: median,
        WORST: worst,
        LONGEST: longest,
    }


def reply_figures(replies: Sequence[Reply]) -> Figures:
    """Counts by status, and the time until an answer; empty without requests.

    Raises RequestsFailed for any other status.
    """
    if wrong := [reply for reply in replies if reply.status not in ORDERLY]:
        first = wrong[0]
        raise RequestsFailed(
            f"{len(wrong)} of {len(replies)} answers to grammars are out of order,"
            f" such as {first.status}: {first.text[:200]}"
        )
    if not replies:
        return {}
    counts = {
        str(status): float(sum(reply.status == status for reply in replies)) for status in ORDERLY
    }
    return {**counts, UNTIL: statistics.median(reply.seconds for reply in replies)}


def conclude(table: Table) -> Sequence[str]:
    return [*(_beside(table, case) for case in CASES[1:]), _answered(table)]


def _beside(table: Table, case: Case) -> str:
    found = {title: ratios(table, (NOTHING, case), title) for title in ROUND_FIGURES}
    mean = found[MEAN]
    times = ", ".join(
        f"{statistics.median(found[title]):.2f} {words}" for title, words in ROUND_FIGURES.items()
    )
    return (
        f"Beside {case.name}, time between tokens is {times}, of that beside nothing: medians of the ratios within a"
        f" turn (quartiles in the mean {quantile(mean, 0.25):.2f} to {quantile(mean, 0.75):.2f}, {len(mean)} turns)."
        f" A new small schema takes {statistics.median(ratios(table, (NOTHING, case), LITTLE)):.2f} of the time."
    )


def _answered(table: Table) -> str:
    sums = {
        status: sum(
            sample.value
            for row in table.values()
            if str(status) in row
            for sample in row[str(status)].samples
        )
        for status in ORDERLY
    }
    each = ", ".join(f"{number:.0f} with {status}" for status, number in sums.items())
    return f"All {sum(sums.values()):.0f} large grammars were answered in order: {each}."


LARGE = InTurn(
    name="large",
    title="Large and pathological grammars beside plain streams",
    method=(
        f"{NUM_STREAMS} greedy streams of {PROMPT_TOKENS} tokens in, {STREAM_TOKENS} out. Beside them {NUM_CLIENTS}"
        " clients send one grammar after the other, none of them twice, each for an answer of at most"
        f" {NEW_TOKENS} tokens, and another one, beside nothing too, small schemas that are new,"
        f" {LITTLE_SECONDS:g} s after each answer. The large ones: JSON schemas of {NUM_BYTES // 1000} kB,"
        f" many objects with four properties each (wide) or objects nested {large_grammars.NUM_LEVELS} deep; chats with"
        f" {large_grammars.NUM_TOOLS} tools of {TOOLS_BYTES // 1000} kB, `tool_choice` being `required`; schemas of"
        f" {large_grammars.NUM_PATTERNS} `patternProperties` that the compiler gives up after its limit of CPU time."
        " Where the prompt that lists the tools is longer than the model's context, they are refused once their grammar"
        " has been read. Statuses are counts of a turn. Read is how long the router's own functions take for such a"
        " grammar in a process that does nothing else."
    ),
    cases=CASES,
    turns=rounds,
    conclude=conclude,
)
