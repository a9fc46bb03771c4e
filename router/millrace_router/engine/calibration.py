"""Measures the costs of steps before the first request comes, so that the first predictions fit this machine."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Round:
    """Requests that run together."""

    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int


ROUNDS = (
    _Round(1, 16, 6),
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
    random, until = Random(0), time.monotonic() + SECONDS  # noqa: S311
    try:
        for round_ in ROUNDS:
            num_requests = min(round_.num_requests, max_batch_size)
            await _run(batcher, [_request(round_, limits, random) for _ in range(num_requests)])
            if time.monotonic() > until:
                break
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
