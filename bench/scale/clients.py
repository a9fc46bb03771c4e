"""Clients that stream: the time to the first token, and whether the stream was whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from millrace.load.measurement import quantile

JSON = {"content-type": "application/json"}


@dataclass(slots=True)
class Outcome:
    """First tokens, answers and failures of a load."""

    first_token_seconds: list[float] = field(default_factory=list)
    num_done: int = 0
    failures: list[str] = field(default_factory=list)

    def p99(self) -> float:
        """The time to the first token that one request in a hundred exceeds."""
        return quantile(sorted(self.first_token_seconds), 0.99)


async def ask(client: aiohttp.ClientSession, url: str, body: bytes, outcome: Outcome) -> None:
    """Stream one completion."""
    began = time.perf_counter()
    try:
        async with client.post(f"{url}/v1/completions", data=body, headers=JSON) as answer:
            parts = [await answer.content.readany()]
            outcome.first_token_seconds.append(time.perf_counter() - began)
            parts += [part async for part in answer.content.iter_any()]
        if answer.status != 200 or not b"".join(parts[-2:]).endswith(b"data: [DONE]\n\n"):
            outcome.failures.append(f"{answer.status} {parts[-1][-200:]!r}")
    except aiohttp.ClientError as error:
        outcome.failures.append(repr(error))
    outcome.num_done += 1


def session() -> aiohttp.ClientSession:
    """A client without limits."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def closed_loop(url: str, body: bytes, *, clients: int, rounds: int) -> Outcome:
    """Have `clients` ask `rounds` times each, one after another."""
    outcome = Outcome()

    async def one() -> None:
        for _ in range(rounds):
            await ask(client, url, body, outcome)

    async with session() as client:
        await asyncio.gather(*(one() for _ in range(clients)))
    return outcome


async def replay(url: str, requests: Sequence[tuple[float, bytes]]) -> Outcome:
    """Send each body at its time, in seconds from now."""
    outcome, began = Outcome(), time.perf_counter()
    async with session() as client, asyncio.TaskGroup() as group:
        for due, body in requests:
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
            group.create_task(ask(client, url, body, outcome))
    return outcome
