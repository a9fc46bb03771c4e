"""A request that runs while others queue up, so that the first static batch is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bench.harness.scrape import scrape
from bench.parts.client import Answer, Client, Request, RequestsFailed, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.outcome import Outcome
from bench.policies.outcomes import outcomes_of

PLUG_PROMPT_TOKENS, PLUG_TOKENS = 32, 256
POLL_SECONDS = 0.02


def plug_of(fixture: Fixture, num_behind: int) -> Request:
    """A stream that outlasts the sending of `num_behind` requests."""
    longest = fixture.fitting(PLUG_PROMPT_TOKENS + max(PLUG_TOKENS, num_behind))
    return Request(
        prompt=fixture.texts.prompt(PLUG_PROMPT_TOKENS, seed=fixture.seed("plug")),
        prompt_tokens=PLUG_PROMPT_TOKENS,
        output_tokens=longest - PLUG_PROMPT_TOKENS,
    )


async def send_behind_plug(fixture: Fixture, url: str, asked: Sequence[Request]) -> list[Outcome]:
    """Outcomes of requests that all wait when the plug ends; they count as due at that moment.

    Raises RequestsFailed, also where the plug ends while some requests do not wait yet.
    """
    async with Client(url) as client:
        plug = Answer(plug_of(fixture, len(asked)), time.perf_counter())
        running = asyncio.create_task(client.send(plug))
        while not (plug.arrivals or plug.ended):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        others = asyncio.create_task(open_loop(client, asked))
        while (await scrape(client))["tgi_queue_size"] < len(asked):
            if plug.ended:
                others.cancel()
                await asyncio.gather(others, return_exceptions=True)
                raise RequestsFailed("the plug ended before all other requests waited")
            await asyncio.sleep(POLL_SECONDS)
        await running
        answers = await others
    succeeded([plug, *answers])
    return outcomes_of(answers, since=plug.ended)
