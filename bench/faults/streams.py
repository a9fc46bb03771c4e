"""Seeded requests of all kinds, the bytes of their answers, and the differences of two runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from bench.harness.client import FAILURES, HttpClient, check
from millrace.load.apis import BadStreamError
from millrace.load.load import stamped_data

TOPICS = ("prefill", "decode", "a KV cache", "the router", "a shard", "a block", "a token")
STOPS = (" batch size", "launcher", " cannot", "prefix cache")
SAMPLES = ("do_sample", "top_k", "typical_p")
"""Parameters that turn on sampling, so that the request needs a seed to be repeatable."""


def mixed_bodies(count: int, *, longest: int) -> list[dict[str, Any]]:
    """Bodies of `count` streams: greedy and sampled, with penalties, stop strings and alternatives.

    Answers have between half of `longest` tokens and all of them, unless a stop string ends them. Every call returns
    the same bodies.
    """
    return [_body(number, longest) for number in range(count)]


def _body(number: int, longest: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "max_new_tokens": longest - number * 37 % (longest // 2),
        "ignore_eos": True,
        "details": True,
    }
    if number % 2:
        parameters |= {"do_sample": True, "temperature": 0.6 + number % 5 / 5}
    if number % 3 == 0:
        parameters |= {"repetition_penalty": 1.2, "frequency_penalty": 0.1}
    if number % 5 == 1:
        parameters |= {"top_k": 20 + number, "top_p": 0.9}
    if number % 7 == 0:
        parameters |= {"typical_p": 0.9, "top_n_tokens": 2}
    if not parameters.keys().isdisjoint(SAMPLES):
        parameters["seed"] = 1000 + number
    if number % 6 == 5:
        parameters |= {"stop": [STOPS[number // 6 % len(STOPS)], "\n\n\n"]}
    question = f"What is {TOPICS[number % len(TOPICS)]}? "
    return {"inputs": f"{number}: {question * (1 + number % 9)}", "parameters": parameters}


@dataclass(slots=True)
class Answer:
    """The answer to one stream."""

    body: Mapping[str, Any]
    events: list[bytes] = field(default_factory=list)
    """JSON of each event, as sent."""
    arrivals: list[float] = field(default_factory=list)
    """Time of each event, in seconds of `time.perf_counter`."""
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether its last event is a final one."""
        return bool(self.events) and self.end.get("generated_text") is not None

    @property
    def end(self) -> dict[str, Any]:
        """The last event; IndexError without events."""
        event: dict[str, Any] = orjson.loads(self.events[-1])
        return event

    @property
    def outcome(self) -> tuple[Sequence[bytes], Mapping[str, Any]]:
        """The part that must not depend on failures of shards: everything except the number of cached tokens."""
        end = self.end
        details = {k: v for k, v in (end["details"] or {}).items() if k != "cached_tokens"}
        return self.events[:-1], {**end, "details": details}


class Clients(HttpClient):
    """All streams of one run, a connection each; use as an asynchronous context manager."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answers: list[Answer] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that have arrived so far."""
        return sum(len(answer.events) for answer in self.answers)

    async def send_all(self, bodies: Iterable[Mapping[str, Any]]) -> list[Answer]:
        """Send all at once and wait for the end of each."""
        self.answers = [Answer(body) for body in bodies]
        await asyncio.gather(*(self.send(answer) for answer in self.answers))
        return self.answers

    async def send(self, answer: Answer) -> None:
        """Send one request, and add its events or its error to `answer`."""
        answer.sent = time.perf_counter()
        try:
            await self._stream(answer)
        except FAILURES as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()

    async def _stream(self, answer: Answer) -> None:
        async with self.post("/generate_stream", answer.body) as response:
            answer.status = response.status
            await check(response)
            async for arrival, data in stamped_data(response):
                if data.startswith(b'{"error"'):
                    raise BadStreamError(data.decode()[:200])
                answer.events.append(data)
                answer.arrivals.append(arrival)
        if not answer.is_whole:
            raise BadStreamError(f"the stream ended after {len(answer.events)} tokens")


def differences(
    undisturbed: Sequence[Answer], disturbed: Sequence[Answer], *, but: int | None = None
) -> list[str]:
    """A line for each stream that failed or differs from the undisturbed run.

    The stream at place `but` does not count. ValueError for runs of different lengths.
    """
    lines = []
    for number, (before, after) in enumerate(zip(undisturbed, disturbed, strict=True)):
        if number == but:
            continue
        if before.error or after.error:
            lines.append(f"stream {number}: {after.error or 'undisturbed, ' + before.error}")
        elif before.outcome != after.outcome:
            lines.append(f"stream {number}: {_first_difference(before, after)}")
    return lines


def _first_difference(before: Answer, after: Answer) -> str:
    for place, (one, other) in enumerate(zip(before.events, after.events, strict=False), 1):
        if one != other:
            return f"token {place} is {other.decode()} instead of {one.decode()}"
    return f"{len(after.events)} tokens instead of {len(before.events)}"
