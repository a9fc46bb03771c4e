"""Measures the costs of steps before the first request comes, so that the first predictions fit this machine."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

import structlog

from millrace_router.engine.batcher import Batcher
from millrace_router.errors import RouterError
from millrace_router.request.limits import Limits
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import read_tokens

log = structlog.get_logger(__name__)

SECONDS = 1.0
"""Time after which no further round begins: a short start matters more than the first predictions."""
LEAST_PROMPT = 16
"""Tokens of the shortest prompt."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Requests that run together."""

    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int

    @property
    def num_tokens(self) -> int:
        """As many as if every step computed the prompts: by this number a token costs less than it does."""
        return self.num_requests * self.num_prompt_tokens * self.num_new_tokens

    def within(self, seconds: float, seconds_per_token: float, *, max_batch_size: int) -> _Round:
        """The same of at most `max_batch_size` requests, with prompts so short that they may take `seconds`."""
        num_requests = min(self.num_requests, max_batch_size)
        most = self.num_prompt_tokens
        if seconds_per_token * num_requests * most > seconds:
            most = max(LEAST_PROMPT, int(seconds / seconds_per_token / num_requests))
        return replace(self, num_requests=num_requests, num_prompt_tokens=most)


ROUNDS = (
    # On a slow machine there is no other round, and these are as many steps as the first prediction needs.
    _Round(1, LEAST_PROMPT, 8),
    _Round(1, 512, 4),
    _Round(8, 64, 6),
    _Round(32, 16, 6),
    _Round(1, 2048, 4),
    _Round(64, 64, 6),
)
"""Few and many rows, short and long prompts, each with some decodes; cheap rounds come first."""


async def calibrate(batcher: Batcher, limits: Limits, *, max_batch_size: int) -> None:
    """Run prompts of random tokens through their own batcher, whose cost model learns from them.

    Returns early once a request fails: serving will meet the same failure, and report it. The batcher
    decides how long it waits for shards that are gone.
    """
    task = asyncio.create_task(batcher.run())
    random, until, seconds_per_token = Random(0), time.monotonic() + SECONDS, 0.0  # noqa: S311
    try:
        for each in ROUNDS:
            begin = time.monotonic()
            if begin > until and each is not ROUNDS[0]:
                break
            left = max(0.0, until - begin)
            round_ = each.within(left, seconds_per_token, max_batch_size=max_batch_size)
            requests = [_request(round_, limits, random) for _ in range(round_.num_requests)]
            await _run(batcher, requests)
            seconds_per_token = (time.monotonic() - begin) / round_.num_tokens
    except RouterError as error:
        log.warning(
            "cannot measure steps; predictions begin once requests have run", error=str(error)
        )
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _run(batcher: Batcher, requests: list[ValidRequest]) -> None:
    for stream in [batcher.submit(request) for request in requests]:
        await read_tokens(stream, lambda _: None)


def _request(round_: _Round, limits: Limits, random: Random) -> ValidRequest:
    num_new = min(round_.num_new_tokens, limits.max_total_tokens - 1)
    num_prompt = min(
        round_.num_prompt_tokens, limits.max_input_tokens, limits.max_total_tokens - num_new
    )
    ids = tuple(random.randrange(limits.vocab_size) for _ in range(num_prompt))
    return ValidRequest(input_ids=ids, max_new_tokens=num_new, ignore_eos=True)
