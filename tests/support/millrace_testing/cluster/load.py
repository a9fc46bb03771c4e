"""Clients that send one request after the other until told to end, and what became of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp
from bench.faults.streams import Answer, Clients

from millrace_testing.launcher.e2e import until

TOKENS = 24
PAUSE_SECONDS = 0.05
"""Replicas start at the same time, on the same cores."""
QUESTIONS = ("What is a token?", "What is a KV cache?", "What does the router do?")


@dataclass
class Load:
    """All requests so far."""

    url: str
    num_tokens: int
    pause_seconds: float
    """Of a client after each answer."""
    answers: list[Answer] = field(default_factory=list)
    """Of requests that have ended."""
    running: list[Answer] = field(default_factory=list)
    is_over: bool = False

    def errors(self, *, since: float = 0) -> list[str]:
        """Of requests that were sent since then and got no whole answer."""
        return [answer.error for answer in self.answers if answer.error and answer.sent > since]

    async def serves_on(self) -> None:
        """Return when a while longer was served."""
        before = self.num_served
        await until(lambda: self.num_served > before + 16)

    @property
    def num_served(self) -> int:
        """Whole answers."""
        return sum(not answer.error for answer in self.answers)

    async def run(self, client: int) -> None:
        """One client: streams and answers in one piece, in turn, over connections that stay open."""
        async with Clients(self.url) as streams, aiohttp.ClientSession(self.url) as session:
            number = 0
            while not self.is_over:
                answer = Answer(self._body(client, number))
                self.running.append(answer)
                if number % 2:
                    await streams.send(answer)
                else:
                    await _send_whole(session, answer)
                self.running.remove(answer)
                self.answers.append(answer)
                number += 1
                await asyncio.sleep(self.pause_seconds)

    def _body(self, client: int, number: int) -> dict[str, Any]:
        question = QUESTIONS[number % len(QUESTIONS)]
        parameters = {"max_new_tokens": self.num_tokens, "ignore_eos": True, "details": True}
        return {"inputs": f"{client}: {question}", "parameters": parameters}


async def _send_whole(session: aiohttp.ClientSession, answer: Answer) -> None:
    answer.sent = perf_counter()
    try:
        async with session.post("/generate", json=answer.body) as response:
            answer.status = response.status
            text = await response.text()
            if response.status != 200 or "generated_text" not in text:
                answer.error = f"{response.status}: {text[:200]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"


@asynccontextmanager
async def load(
    url: str, num_clients: int, *, num_tokens: int = TOKENS, pause_seconds: float = PAUSE_SECONDS
) -> AsyncIterator[Load]:
    """So many clients during the block; their last requests end before it does."""
    found = Load(url, num_tokens, pause_seconds)
    async with asyncio.TaskGroup() as group:
        for client in range(num_clients):
            group.create_task(found.run(client))
        try:
            yield found
        finally:
            found.is_over = True
