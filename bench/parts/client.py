"""Sends requests of different lengths, times and tenants, and takes the arrival times of their tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.harness.client import FAILURES, HttpClient, check
from millrace.load.apis import BadStreamError
from millrace.load.load import stamped_events

DETAILS: dict[str, Any] = {"ignore_eos": True, "details": True, "do_sample": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, and the behaviour of its client."""

    prompt: str
    prompt_tokens: int
    output_tokens: int
    """Tokens after which the answer ends."""
    due: float = 0.0
    """Seconds after the start; a closed loop ignores it."""
    streams: bool = True
    adapter: str = ""
    """The name of its LoRA adapter; empty for the base model."""

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        parameters = DETAILS | {"max_new_tokens": self.output_tokens}
        if self.adapter:
            parameters["adapter_id"] = self.adapter
        return {"inputs": self.prompt, "parameters": parameters}


@dataclass(slots=True)
class Answer:
    """The outcome of a request; times in seconds of one monotonic clock."""

    request: Request
    due: float
    arrivals: list[float] = field(default_factory=list)
    """One for each token; empty for an answer in one piece."""
    ended: float = 0.0
    num_tokens: int = 0
    error: str = ""

    @property
    def first_token_seconds(self) -> float:
        """Time to first token; IndexError without a token."""
        return self.arrivals[0] - self.due


class Client(HttpClient):
    """Sends requests to one server."""

    async def send(self, answer: Answer) -> None:
        """Send the request now, and add its tokens or its error to `answer`."""
        try:
            await (self._stream if answer.request.streams else self._whole)(answer)
        except FAILURES as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()

    async def _stream(self, answer: Answer) -> None:
        async with self.post("/generate_stream", answer.request.body()) as response:
            await check(response)
            async for arrival, event in stamped_events(response):
                if "error" in event:
                    raise BadStreamError(f"{event.get('error_type')}: {event['error']}")
                answer.arrivals.append(arrival)
                answer.num_tokens += 1
        _check_length(answer)

    async def _whole(self, answer: Answer) -> None:
        async with self.post("/generate", answer.request.body()) as response:
            await check(response)
            answer.num_tokens = (await response.json())["details"]["generated_tokens"]
        _check_length(answer)


def _check_length(answer: Answer) -> None:
    wanted = answer.request.output_tokens
    if answer.num_tokens != wanted:
        raise BadStreamError(f"asked for {wanted} tokens, got {answer.num_tokens}")


async def open_loop(client: Client, requests: Sequence[Request]) -> list[Answer]:
    """Send each request when it is due, regardless of earlier answers, and wait for all."""
    start = time.perf_counter()
    answers = []
    async with asyncio.TaskGroup() as tasks:
        for request in sorted(requests, key=lambda request: request.due):
            due = start + request.due
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            answers.append(Answer(request, due))
            tasks.create_task(client.send(answers[-1]))
    return answers


async def closed_loop(
    client: Client, requests: Sequence[Request], *, num_clients: int
) -> list[Answer]:
    """Send the requests by `num_clients` clients, each one after the answer to its last."""
    left: Iterator[Request] = iter(requests)
    answers: list[Answer] = []

    async def one() -> None:
        for request in left:
            answers.append(Answer(request, time.perf_counter()))
            await client.send(answers[-1])

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_clients):
            tasks.create_task(one())
    return answers


class RequestsFailed(Exception):  # noqa: N818
    """Requests that must succeed failed; the message holds some of the reasons."""


def succeeded(answers: Sequence[Answer]) -> Sequence[Answer]:
    """The same answers; raises RequestsFailed unless every request was answered."""
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        some = "; ".join(sorted(set(errors))[:3])
        raise RequestsFailed(f"{len(errors)} of {len(answers)} requests failed: {some}")
    return answers
