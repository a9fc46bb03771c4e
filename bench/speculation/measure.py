"""Two servers, one that guesses and one that does not, on the same requests in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import aiohttp

from bench.load import READ_TIMEOUT_SECONDS
from bench.machine import CpuMeter
from bench.repeats import Repeated, Sample
from bench.report import markdown
from bench.scheduling.scrape import grown, parse
from bench.serve import RunningServer, serving
from bench.speculation.texts import bodies

STREAMS = (1, 8, 32)
LEAST_RATIO = 0.95
"""Of the rate without guesses, that nothing may fall below."""
TOKENS, STEPS = "tgi_request_skipped_tokens_sum", "tgi_request_skipped_tokens_count"
DRAFTED = "millrace_speculation_drafted_tokens_total"
ACCEPTED = "millrace_speculation_accepted_tokens_total"

T = TypeVar("T")


class AnswersDifferError(Exception):
    """Guessing has changed an answer."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients that each ask as soon as they have their answer, for one kind of text."""

    text: str
    num_streams: int

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.text}, {self.num_streams} at once"


@dataclass(frozen=True, slots=True)
class Round:
    """What came of the requests of one round at one server."""

    answers: Sequence[str]
    rate: float
    """Tokens per second."""
    metrics: Mapping[str, float]
    """How much each counter grew."""
    other_cores: float


@dataclass(frozen=True, slots=True)
class Row:
    """One load at both servers, round by round."""

    load: Load
    plain: Sequence[Round]
    guessing: Sequence[Round]

    def joined(self, other: Row) -> Row:
        """With the rounds of another start of the servers."""
        return Row(self.load, [*self.plain, *other.plain], [*self.guessing, *other.guessing])

    @property
    def speedup(self) -> float:
        """Median over the rounds, in each of which both servers had the same requests right after each other."""
        pairs = zip(self.plain, self.guessing, strict=True)
        return median(guessing.rate / plain.rate for plain, guessing in pairs)

    @property
    def tokens_per_step(self) -> float:
        """Of one row, over the steps in which it yielded any."""
        return 1.0 + _total(self.guessing, TOKENS) / _total(self.guessing, STEPS)

    @property
    def accepted(self) -> float:
        """Share of the guesses that were right."""
        return _total(self.guessing, ACCEPTED) / max(1.0, _total(self.guessing, DRAFTED))

    @property
    def drafted(self) -> float:
        """Guesses for each row and step."""
        return _total(self.guessing, DRAFTED) / _total(self.guessing, STEPS)


def _total(rounds: Sequence[Round], series: str) -> float:
    return sum(each.metrics[series] for each in rounds)


@contextmanager
def servers(
    model: Path, *, out: Path, guess: Sequence[str], flags: Sequence[str]
) -> Iterator[tuple[RunningServer, RunningServer]]:
    """One that does not guess, and one that does so by the flags `guess`; raises ServerError."""
    every = ["--max-batch-size=32", "--max-concurrent-requests=64", *flags]
    with (
        serving(model, log=out / "speculation-off.log", flags=every) as plain,
        serving(model, log=out / "speculation-on.log", flags=[*every, *guess]) as guessing,
    ):
        yield plain, guessing


async def run_round(
    server: RunningServer, requests: Sequence[Mapping[str, Any]], num_streams: int
) -> Round:
    """Send all requests, `num_streams` at once. Raises AnswersDifferError or aiohttp.ClientError."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_SECONDS)
    answers, tokens, waiting = [""] * len(requests), [0] * len(requests), iter(enumerate(requests))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as session:

        async def client() -> None:
            for number, body in waiting:
                async with session.post("/generate", json=body) as response:
                    response.raise_for_status()
                    found = await response.json()
                answers[number] = found["generated_text"]
                tokens[number] = found["details"]["generated_tokens"]

        async def scrape() -> dict[str, float]:
            async with session.get("/metrics") as response:
                return parse(await response.text())

        before, meter = await scrape(), CpuMeter(server.processes)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_streams):
                clients.create_task(client())
        seconds = time.perf_counter() - began
        other_cores, after = meter.stop().other_cores, await scrape()
    metrics = {
        series: grown(before, after, series) for series in (TOKENS, STEPS, DRAFTED, ACCEPTED)
    }
    return Round(answers, sum(tokens) / seconds, metrics, other_cores)


def run_load(
    plain: RunningServer,
    guessing: RunningServer,
    load: Load,
    *,
    rounds: int,
    requests_per_stream: int,
    start: int = 0,
) -> Row:
    """One round to warm up, then `rounds` that count; raises AnswersDifferError. Each `start` has other requests."""
    kept: tuple[list[Round], list[Round]] = ([], [])
    for number in range(rounds + 1):
        count = load.num_streams * requests_per_stream
        requests = bodies(load.text, count=count, seed=f"{load.name}/{start}/{number}")
        first, second = [
            asyncio.run(run_round(server, requests, load.num_streams))
            for server in order(number, plain, guessing)
        ]
        found = order(number, first, second)
        if found[0].answers != found[1].answers:
            raise AnswersDifferError(f"{load.name}: guessing has changed an answer")
        if number:
            for rounds_kept, each in zip(kept, found, strict=True):
                rounds_kept.append(each)
    return Row(load, *kept)


def order(number: int, first: T, second: T) -> Sequence[T]:
    """Both, every other time the second one first: who comes after a pause is slower. Its own inverse."""
    return (second, first) if number % 2 else (first, second)


def table(rows: Sequence[Row]) -> str:
    """One line for each load."""
    titles = (
        "",
        "tok/s without",
        "tok/s with",
        "speed-up",
        "tokens per step of a row",
        "guesses",
        "right",
    )
    return markdown(titles, [_line(row) for row in rows])


def _line(row: Row) -> tuple[str, ...]:
    return (
        row.load.name,
        _rates(row.plain),
        _rates(row.guessing),
        f"{row.speedup:.2f}",
        f"{row.tokens_per_step:.2f}",
        f"{row.drafted:.2f}",
        f"{100 * row.accepted:.0f} %",
    )


def _rates(rounds: Sequence[Round]) -> str:
    return Repeated(tuple(Sample(each.rate, each.other_cores) for each in rounds)).text


def verdict(rows: Sequence[Row]) -> str:
    """Whether guessing ever cost more than it may."""
    worst = min(rows, key=lambda row: row.speedup)
    met = "met" if worst.speedup >= LEAST_RATIO else "missed"
    return (
        f"Worst: {worst.load.name}, {worst.speedup:.2f} of the rate without guesses"
        f" (at least {LEAST_RATIO}: {met}). Every answer is the same letter for letter with and without."
    )
