"""Sends a load to real routers through one of the simulator's gateways, and takes the times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from bench.scale.clients import JSON
from bench.scale.gateway import Gateway, Ticket
from bench.scale.load import completion, num_output_tokens
from bench.scale.replicas import Replica
from millrace.load.measurement import quantile
from millrace.simulate.simulated_request import Arrival


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
        timeout = aiohttp.ClientTimeout(total=600)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            before = await self._prompt_tokens()
            start = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for number, arrival in enumerate(arrivals):
                        due = start + arrival.arrived_at
                        body = self._body(arrival, number)
                        await asyncio.sleep(max(0.0, due - time.perf_counter()))
                        ticket = Ticket(arrival, number, arrival.arrived_at)
                        ticket.replica = self.gateway.choose(ticket)
                        self.gateway.sent(ticket)
                        now = time.perf_counter()
                        self.sent.append(arrival._replace(arrived_at=now - start))
                        tasks.create_task(self._send(session, ticket, body, now))
                        # It is sent before the next choice, as a gateway does.
                        await asyncio.sleep(0)
            except* (ReplayError, aiohttp.ClientError, TimeoutError) as errors:
                raise ReplayError(str(errors.exceptions[0])) from errors
            seconds = time.perf_counter() - start - arrivals[0].arrived_at
            hits, computed = (
                after - earlier
                for after, earlier in zip(await self._prompt_tokens(), before, strict=True)
            )
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

    def _body(self, arrival: Arrival, number: int) -> bytes:
        return completion(self.prompts[number], arrival.output_tokens)

    async def _send(
        self, session: aiohttp.ClientSession, ticket: Ticket, body: bytes, sent_at: float
    ) -> None:
        url = f"{self.replicas[ticket.replica].url}/v1/completions"
        async with session.post(url, data=body, headers=JSON) as response:
            if response.status != 200:
                raise ReplayError(f"status {response.status}: {(await response.text())[:200]}")
            text = b""
            async for chunk in response.content.iter_any():
                if not text:
                    self.first_tokens.append(time.perf_counter() - sent_at)
                    self.gateway.began(ticket)
                text += chunk
        self.gateway.left(ticket)
        if not text.rstrip().endswith(b"data: [DONE]"):
            raise ReplayError(f"the answer of request {ticket.number} broke: {text[-200:]!r}")
