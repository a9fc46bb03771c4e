"""Signals to shards while streams run: when, to whom, and what the clients felt."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.survival.deployment import Deployment
from bench.survival.recovery import all_moving_at, parts, pause_end
from bench.survival.streams import Answer, Clients

EARLIEST, LATEST = 0.02, 0.9
"""Between which shares of all tokens blows fall."""
MOST_DELAY_SECONDS = 0.3
"""A blow falls at a random moment so long after the token that calls for it, and not at an answer."""
MOST_SECONDS_INTO_RECOVERY = 3.0
POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Blow:
    """One signal to one rank."""

    number: signal.Signals
    rank: int
    after_tokens: int
    """Tokens at all clients together that it waits for."""
    delay_seconds: float
    in_recovery: bool = False
    """Whether it falls on the new shard, while the one before is still being recovered from."""


@dataclass(slots=True)
class Fallen:
    """A blow that has fallen, times in seconds of `time.perf_counter`."""

    blow: Blow
    at: float
    pid: int
    num_tokens: int
    """Tokens that had arrived."""
    first_token: float | None = None
    """Seconds from the blow to the first new token of any stream."""
    all_moving: float | None = None
    """Seconds from it until every stream that ran has a new token."""
    parts: dict[str, float] = field(default_factory=dict)


def schedule(
    count: int, *, num_tokens: int, rank: int, number: signal.Signals, seed: str
) -> list[Blow]:
    """`count` blows at random moments of a run of `num_tokens`, one of them, given three, during a recovery.

    No two others are closer than half of their mean distance, so that the recovery from each can be measured.
    """
    draw = random.Random(seed)
    in_recovery = draw.randrange(1, count - 1) if count > 2 else None
    num_places = count - (in_recovery is not None)
    width = (LATEST - EARLIEST) / max(1, num_places)
    places = [EARLIEST + width * (k + draw.random() / 2) for k in range(num_places)]
    blows = [
        Blow(number, rank, int(p * num_tokens), draw.random() * MOST_DELAY_SECONDS) for p in places
    ]
    if in_recovery is not None:
        delay = draw.random() * MOST_SECONDS_INTO_RECOVERY
        before = blows[in_recovery - 1]
        blows.insert(in_recovery, Blow(number, rank, before.after_tokens, delay, in_recovery=True))
    return blows


async def strike(deployment: Deployment, clients: Clients, blows: Sequence[Blow]) -> list[Fallen]:
    """Deal every blow when it is due. Raises NoShard."""
    fallen: list[Fallen] = []
    for blow in blows:
        while clients.num_tokens < blow.after_tokens:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        unlike = 0
        if blow.in_recovery:
            unlike = fallen[-1].pid
            await asyncio.to_thread(deployment.shard, blow.rank, unlike=unlike)
        await asyncio.sleep(blow.delay_seconds)
        num_tokens = clients.num_tokens
        at, pid = await asyncio.to_thread(deployment.harm, blow.rank, blow.number, unlike=unlike)
        fallen.append(Fallen(blow, at, pid, num_tokens))
    return fallen


def measure(fallen: Sequence[Fallen], answers: Sequence[Answer], deployment: Deployment) -> None:
    """Fill in what each blow cost, from the clients' arrivals and the log.

    The recovery from a blow that fell in another's is measured from the later one.
    """
    to_unix = time.time() - time.perf_counter()
    lines = deployment.lines()
    streams = [answer.arrivals for answer in answers]
    arrivals = [at for stream in streams for at in stream]
    ends = [blow.at for blow in fallen[1:]] + [max(arrivals, default=0.0) + 1e-6]
    for blow, until in zip(fallen, ends, strict=True):
        if any(other.blow.in_recovery and other.at == until for other in fallen):
            continue
        resumed = pause_end(arrivals, since=blow.at, until=until)
        if resumed is None:
            continue
        blow.first_token = resumed - blow.at
        moving = all_moving_at(streams, resumed=resumed, until=until)
        blow.all_moving = None if moving is None else moving - blow.at
        blow.parts = parts(lines, since=blow.at + to_unix, until=resumed + to_unix)
