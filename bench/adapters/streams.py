"""Streams that run together, and their rate while all of them run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.harness.server import RunningServer
from bench.parts.client import Answer, Client, Request, closed_loop, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.workloads import gaps_within

NUM_STREAMS = 32
PROMPT_TOKENS = 32


def num_streams(fixture: Fixture) -> int:
    """The number of streams that run together."""
    return fixture.sized(NUM_STREAMS, 4)


def requests(
    fixture: Fixture,
    adapters: Sequence[str],
    *,
    output_tokens: int,
    seed: str,
    prompt_tokens: int = PROMPT_TOKENS,
) -> list[Request]:
    """A request with a prompt of its own for each of `adapters`; an empty name is the base model."""
    return [
        Request(
            prompt=fixture.texts.prompt(prompt_tokens, seed=f"{fixture.seed(seed)}/{number}"),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            adapter=adapter,
        )
        for number, adapter in enumerate(adapters)
    ]


def together(server: RunningServer, asked: Sequence[Request]) -> list[Answer]:
    """Send all requests at once, and wait for all answers; raises RequestsFailed."""

    async def run() -> list[Answer]:
        async with Client(server.url) as client:
            return list(succeeded(await open_loop(client, asked)))

    return asyncio.run(run())


def in_turn(server: RunningServer, asked: Sequence[Request], *, num_clients: int) -> list[Answer]:
    """Send the requests by `num_clients` clients, and wait for all answers; raises RequestsFailed."""

    async def run() -> list[Answer]:
        async with Client(server.url) as client:
            return list(succeeded(await closed_loop(client, asked, num_clients=num_clients)))

    return asyncio.run(run())


def fetch(fixture: Fixture, server: RunningServer, adapters: Sequence[str]) -> None:
    """Ask for one token of each adapter, so that its checked copy is in the cache; raises RequestsFailed."""
    asked = requests(fixture, adapters, output_tokens=1, seed="fetch")
    in_turn(server, asked, num_clients=4)


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens a second from the first token on, which is not counted; streams begin together and have one length."""
    begin = min(answer.arrivals[0] for answer in answers)
    end = max(answer.arrivals[-1] for answer in answers)
    return (sum(answer.num_tokens for answer in answers) - 1) / (end - begin)


def gaps(answers: Sequence[Answer]) -> list[float]:
    """Seconds between tokens from the time on at which all streams have one."""
    begin = max(answer.arrivals[0] for answer in answers)
    end = max(answer.arrivals[-1] for answer in answers)
    return [gap for answer in answers for gap in gaps_within(answer.arrivals, begin, end)]
