"""Sends requests to fresh routers until they have learned what steps cost: until then they plan each step at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import aiohttp

from bench.scale.clients import Outcome, ask, session
from bench.scale.load import FIRST_ID, completion
from bench.scale.replicas import Replica

NUM_REQUESTS = 40
"""Requests to each router. Their prompts and answers take some hundreds of steps, and a router learns from each."""
MEAN_GAP_SECONDS = 0.5
PROMPT_TOKENS = (32, 700)
ANSWER_TOKENS = (4, 24)


async def warm_up(replicas: Sequence[Replica], vocab_size: int) -> list[str]:
    """Send each router prompts that no load has; return what failed."""
    async with session() as client:
        outcomes = await asyncio.gather(
            *(_teach(client, replica, vocab_size, str(n)) for n, replica in enumerate(replicas))
        )
    return [failure for outcome in outcomes for failure in outcome.failures]


async def _teach(
    client: aiohttp.ClientSession, replica: Replica, vocab_size: int, name: str
) -> Outcome:
    random, outcome = Random(f"warm-up {name}"), Outcome()
    ids = range(vocab_size)[FIRST_ID:] or range(vocab_size)
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_REQUESTS):
            prompt = random.choices(ids, k=random.randint(*PROMPT_TOKENS))
            body = completion(prompt, random.randint(*ANSWER_TOKENS))
            group.create_task(ask(client, replica.url, body, outcome))
            await asyncio.sleep(random.expovariate(1 / MEAN_GAP_SECONDS))
    return outcome
