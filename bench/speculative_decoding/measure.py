"""Two servers, with draft tokens and without, on the same requests in turn.

Requests are questions for the demo model: with the answer already in the prompt, and without.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from demo.corpus import Ask, wordings

from bench.harness.client import HttpClient, check
from bench.harness.machine import CpuMeter
from bench.harness.repeats import Repeated, Sample
from bench.harness.scrape import grown, scrape
from bench.harness.server import RunningServer, serving
from bench.harness.tables import markdown

STREAMS = (1, 8, 32)
LEAST_RATIO = 0.95
"""The least speed-up that passes."""
TOKENS, STEPS = "tgi_request_skipped_tokens_sum", "tgi_request_skipped_tokens_count"
DRAFTED = "millrace_speculation_drafted_tokens_total"
ACCEPTED = "millrace_speculation_accepted_tokens_total"

T = TypeVar("T")

SEED = 1
"""Seed of the demo model's corpus."""
MOST_TOKENS = 120
NUM_PRECEDENTS = 3
"""Other questions in a repetitive prompt, with their answers."""


def bodies(text: str, *, count: int, seed: str) -> list[Mapping[str, Any]]:
    """`count` greedy requests for `/generate` of the kind `text`, a key of `KINDS`, from a seed."""
    generator = random.Random(seed)
    asks = [ask for ask in wordings(SEED) if len(ask.topic.answer) > 60]
    prompts = [KINDS[text](generator.sample(asks, NUM_PRECEDENTS + 1)) for _ in range(count)]
    parameters = {"max_new_tokens": MOST_TOKENS, "details": True}
    return [{"inputs": prompt, "parameters": parameters} for prompt in prompts]


def _plain(asks: Sequence[Ask]) -> str:
    return f"{asks[0].text}\n"


def _repetitive(asks: Sequence[Ask]) -> str:
    """A question that the history before it already answers."""
    history = "".join(f"{ask.text}\n{ask.topic.answer}\n" for ask in asks)
    return f"{history}{asks[0].text}\n"


KINDS = {"repetitive": _repetitive, "plain": _plain}


class AnswersDifferError(Exception):
    """Draft tokens changed an answer."""


@dataclass(frozen=True, slots=True)
class Load:
    """A number of clients in a closed loop, and the kind of text that they ask for."""

    text: str
    num_streams: int

    @property
    def name(self) -> str:
        """Its name in the table."""
        return f"{self.text}, {self.num_streams} at once"


@dataclass(frozen=True, slots=True)
class Round:
    """The outcome of one round at one server."""

    answers: Sequence[str]
    rate: float
    """Tokens per second."""
    metrics: Mapping[str, float]
    """The growth of each counter."""
    other_cores: float


@dataclass(frozen=True, slots=True)
class Row:
    """One load at both servers, round by round."""

    load: Load
    plain: Sequence[Round]
    speculative: Sequence[Round]

    def joined(self, other: Row) -> Row:
        """The row with the rounds of another start of the servers."""
        return Row(self.load, [*self.plain, *other.plain], [*self.speculative, *other.speculative])

    @property
    def speedup(self) -> float:
        """Median over the rounds; in a round both servers get the same requests one right after the other."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return median(speculative.rate / plain.rate for plain, speculative in pairs)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one row, over the steps in which it yielded any."""
        return 1.0 + _total(self.speculative, TOKENS) / _total(self.speculative, STEPS)

    @property
    def accepted(self) -> float:
        """Share of the draft tokens that were accepted."""
        return _total(self.speculative, ACCEPTED) / max(1.0, _total(self.speculative, DRAFTED))

    @property
    def drafted(self) -> float:
        """Draft tokens of a row in a step."""
        return _total(self.speculative, DRAFTED) / _total(self.speculative, STEPS)

    def as_json(self) -> dict[str, Any]:
        """Medians and ratios."""
        return {
            "load": self.load.name,
            "rounds": len(self.plain),
            "speedup": self.speedup,
            "plain": median(each.rate for each in self.plain),
            "speculative": median(each.rate for each in self.speculative),
            "tokens_per_step": self.tokens_per_step,
            "accepted": self.accepted,
            "drafted": self.drafted,
            "other_cores": max(each.other_cores for each in (*self.plain, *self.speculative)),
        }


def _total(rounds: Sequence[Round], series: str) -> float:
    return sum(each.metrics[series] for each in rounds)


@contextmanager
def servers(
    model: Path, *, out: Path, draft_flags: Sequence[str], flags: Sequence[str]
) -> Iterator[tuple[RunningServer, RunningServer]]:
    """A server without draft tokens, and one with `draft_flags`; raises ServerError."""
    every = ["--max-batch-size=32", "--max-concurrent-requests=64", *flags]
    with (
        serving(model, log=out / "speculation-off.log", flags=every) as plain,
        serving(model, log=out / "speculation-on.log", flags=[*every, *draft_flags]) as speculative,
    ):
        yield plain, speculative


async def run_round(
    server: RunningServer, requests: Sequence[Mapping[str, Any]], num_streams: int
) -> Round:
    """Send all requests, `num_streams` at once. Raises one of FAILURES."""
    answers, tokens, waiting = [""] * len(requests), [0] * len(requests), iter(enumerate(requests))
    async with HttpClient(server.url) as client:

        async def ask() -> None:
            for number, body in waiting:
                async with client.post("/generate", body) as response:
                    await check(response)
                    answer = await response.json()
                answers[number] = answer["generated_text"]
                tokens[number] = answer["details"]["generated_tokens"]

        before, meter = await scrape(client), CpuMeter(server.processes)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_streams):
                clients.create_task(ask())
        seconds = time.perf_counter() - began
        other_cores, after = meter.stop().other_cores, await scrape(client)
    metrics = {
        series: grown(before, after, series) for series in (TOKENS, STEPS, DRAFTED, ACCEPTED)
    }
    return Round(answers, sum(tokens) / seconds, metrics, other_cores)


def run_load(
    plain: RunningServer,
    speculative: RunningServer,
    load: Load,
    *,
    rounds: int,
    requests_per_stream: int,
    start: int = 0,
) -> Row:
    """One round to warm up, then `rounds` that count; raises AnswersDifferError. Requests depend on `start`."""
    kept: tuple[list[Round], list[Round]] = ([], [])
    for number in range(rounds + 1):
        count = load.num_streams * requests_per_stream
        requests = bodies(load.text, count=count, seed=f"{load.name}/{start}/{number}")
        first, second = [
            asyncio.run(run_round(server, requests, load.num_streams))
            for server in order(number, plain, speculative)
        ]
        found = order(number, first, second)
        if found[0].answers != found[1].answers:
            raise AnswersDifferError(f"{load.name}: draft tokens changed an answer")
        if number:
            for rounds_kept, each in zip(kept, found, strict=True):
                rounds_kept.append(each)
    return Row(load, *kept)


def order(number: int, first: T, second: T) -> Sequence[T]:
    """Both, in alternating order, because the first one after a pause is slower. Its own inverse."""
    return (second, first) if number % 2 else (first, second)


def table(rows: Sequence[Row]) -> str:
    """One line for each load."""
    titles = (
        "",
        "tok/s without",
        "tok/s with",
        "speed-up",
        "tokens per step of a row",
        "draft tokens a step",
        "accepted",
    )
    return markdown(titles, [_line(row) for row in rows])


def _line(row: Row) -> tuple[str, ...]:
    return (
        row.load.name,
        _rates(row.plain),
        _rates(row.speculative),
        f"{row.speedup:.2f}",
        f"{row.tokens_per_step:.2f}",
        f"{row.drafted:.2f}",
        f"{100 * row.accepted:.0f} %",
    )


def _rates(rounds: Sequence[Round]) -> str:
    return Repeated(tuple(Sample(each.rate, each.other_cores) for each in rounds)).text


def verdict(rows: Sequence[Row]) -> str:
    """Whether speculative decoding was ever slower than allowed."""
    worst = min(rows, key=lambda row: row.speedup)
    met = "met" if worst.speedup >= LEAST_RATIO else "missed"
    return (
        f"Worst: {worst.load.name}, {worst.speedup:.2f} of the rate without draft tokens"
        f" (at least {LEAST_RATIO}: {met}). Every answer has the same bytes with and without."
    )
