"""Clients of real routers: a load through one of the simulator's gateways, whose times are taken, and a warm-up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import aiohttp

from bench.scale.gateway import Gateway, Ticket
from bench.scale.load import FIRST_ID, completion, num_output_tokens
from bench.scale.replicas import Replica
from millrace.load.measurement import quantile
from millrace.simulate.simulated_request import Arrival

NUM_REQUESTS = 40
"""Requests to each router. Their prompts and answers take some hundreds of steps, and a router learns from each."""
MEAN_GAP_SECONDS = 0.5
PROMPT_TOKENS = (32, 700)
ANSWER_TOKENS = (4, 24)
SECONDS = 600.0
"""The longest time of an answer."""
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a load, measured or simulated."""

    hit_share: float
    tokens_per_second: float
    ttft_p50: float
    """Seconds."""
    ttft_p90: float


class ReplayError(Exception):
    """A router refused a request or broke its answer."""


@asynccontextmanager
async def sending() -> AsyncIterator[tuple[aiohttp.ClientSession, asyncio.TaskGroup]]:
    """A session of any number of connections, and tasks that send with it; raises ReplayError if one of them failed."""
    timeout, connector = aiohttp.ClientTimeout(total=SECONDS), aiohttp.TCPConnector(limit=0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            yield session, tasks
    except ExceptionGroup as errors:
        _, others = errors.split((ReplayError, aiohttp.ClientError, TimeoutError))
        if others is not None:
            raise
        raise ReplayError(str(errors.exceptions[0])) from errors


async def stream(
    session: aiohttp.ClientSession, url: str, body: bytes, began: Callable[[], None]
) -> None:
    """Stream a completion, and call `began` at its first bytes; raises ReplayError or aiohttp.ClientError."""
    async with session.post(f"{url}/v1/completions", data=body, headers=JSON) as response:
        if response.status != 200:
            raise ReplayError(f"status {response.status}: {(await response.text())[:200]}")
        text = b""
        async for chunk in response.content.iter_any():
            if not text:
                began()
            text += chunk
    if not text.rstrip().endswith(b"data: [DONE]"):
        raise ReplayError(f"an answer broke: {text[-200:]!r}")


async def warm_up(replicas: Sequence[Replica], vocab_size: int) -> None:
    """Send each fresh router prompts that no load has, until it has learned what steps cost; raises ReplayError.

    Until then a router plans each step at once.
    """
    async with sending() as (session, tasks):
        for number, replica in enumerate(replicas):
            tasks.create_task(_teach(session, tasks, replica, vocab_size, number))


async def _teach(
    session: aiohttp.ClientSession,
    tasks: asyncio.TaskGroup,
    replica: Replica,
    vocab_size: int,
    number: int,
) -> None:
    random = Random(f"warm-up {number}")
    ids = range(vocab_size)[FIRST_ID:] or range(vocab_size)
    for _ in range(NUM_REQUESTS):
        prompt = random.choices(ids, k=random.randint(*PROMPT_TOKENS))
        body = completion(prompt, random.randint(*ANSWER_TOKENS))
        tasks.create_task(stream(session, replica.url, body, lambda: None))
        await asyncio.sleep(random.expovariate(1 / MEAN_GAP_SECONDS))


@dataclass(slots=True)
class Replay:
    """One run of a load."""

    replicas: Sequence[Replica]
    gateway: Gateway
    prompts: Sequence[Sequence[int]]
    """Token ids of each request."""
    first_tokens: list[float] = field(default_factory=list)
    """Seconds from when a request was sent."""
    sent: list[Arrival] = field(default_factory=list)
    """The requests at the times at which they were sent: one client cannot send many at one moment, as traces do."""

    async def run(self, arrivals: Sequence[Arrival]) -> Figures:
        """Send every request when it is due; raises ReplayError."""
        before = await self._prompt_tokens()
        async with sending() as (session, tasks):
            start = time.perf_counter()
            for number, arrival in enumerate(arrivals):
                due = start + arrival.arrived_at
                body = completion(self.prompts[number], arrival.output_tokens)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                ticket = Ticket(arrival, number, arrival.arrived_at)
                ticket.replica = self.gateway.choose(ticket)
                self.gateway.sent(ticket)
                now = time.perf_counter()
                self.sent.append(arrival._replace(arrived_at=now - start))
                tasks.create_task(self._send(session, ticket, body, now))
                # It is sent before the next choice, as a gateway does.
                await asyncio.sleep(0)
        seconds = time.perf_counter() - start - arrivals[0].arrived_at
        after = await self._prompt_tokens()
        hits, computed = (now - then for now, then in zip(after, before, strict=True))
        ordered = sorted(self.first_tokens)
        return Figures(
            hits / (hits + computed),
            num_output_tokens(arrivals) / seconds,
            quantile(ordered, 0.5),
            quantile(ordered, 0.9),
        )

    async def _prompt_tokens(self) -> tuple[float, float]:
        """Prompt tokens that all routers have found in their caches, and computed."""
        counts = [await asyncio.to_thread(replica.prompt_tokens) for replica in self.replicas]
        return sum(hits for hits, _ in counts), sum(computed for _, computed in counts)

    async def _send(
        self, session: aiohttp.ClientSession, ticket: Ticket, body: bytes, sent_at: float
    ) -> None:
        def began() -> None:
            self.first_tokens.append(time.perf_counter() - sent_at)
            self.gateway.began(ticket)

        await stream(session, self.replicas[ticket.replica].url, body, began)
        self.gateway.left(ticket)
