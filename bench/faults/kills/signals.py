"""Signals to shards while streams run: when they are sent, and what each costs the clients."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.faults.deployment import Deployment
from bench.faults.kills.recovery import all_moving_at, parts, pause_end
from bench.faults.streams import Answer, Clients

EARLIEST, LATEST = 0.02, 0.9
"""The shares of all tokens between which signals are sent."""
MOST_DELAY_SECONDS = 0.3
"""The most by which a signal follows its token, so that signals do not coincide with answers."""
MOST_SECONDS_INTO_RECOVERY = 3.0
POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class PlannedSignal:
    """One signal to one rank."""

    number: signal.Signals
    rank: int
    after_tokens: int
    """Tokens that have arrived at all clients together before it is due."""
    delay_seconds: float
    in_recovery: bool = False
    """Whether it goes to the new shard, during the recovery from the signal before it."""


@dataclass(slots=True)
class SentSignal:
    """A signal that was sent; times in seconds of `time.perf_counter`."""

    planned: PlannedSignal
    at: float
    pid: int
    num_tokens: int
    """Tokens that had arrived."""
    first_token: float | None = None
    """Seconds from the signal to the first new token of any stream."""
    all_moving: float | None = None
    """Seconds from the signal until every running stream has a new token."""
    parts: dict[str, float] = field(default_factory=dict)


def schedule(
    count: int, *, num_tokens: int, rank: int, number: signal.Signals, seed: str
) -> list[PlannedSignal]:
    """`count` signals at random moments of a run of `num_tokens`; from three on, one of them during a recovery.

    All others are at least half of their mean distance apart, so that the recovery from each can be measured.
    """
    draw = random.Random(seed)
    in_recovery = draw.randrange(1, count - 1) if count > 2 else None
    num_places = count - (in_recovery is not None)
    width = (LATEST - EARLIEST) / max(1, num_places)
    places = [EARLIEST + width * (k + draw.random() / 2) for k in range(num_places)]
    signals = [
        PlannedSignal(number, rank, int(p * num_tokens), draw.random() * MOST_DELAY_SECONDS)
        for p in places
    ]
    if in_recovery is not None:
        delay = draw.random() * MOST_SECONDS_INTO_RECOVERY
        before = signals[in_recovery - 1]
        signals.insert(
            in_recovery, PlannedSignal(number, rank, before.after_tokens, delay, in_recovery=True)
        )
    return signals


async def send_all(
    deployment: Deployment, clients: Clients, signals: Sequence[PlannedSignal]
) -> list[SentSignal]:
    """Send every signal when it is due. Raises NoShard."""
    sent: list[SentSignal] = []
    for planned in signals:
        while clients.num_tokens < planned.after_tokens:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        unlike = 0
        if planned.in_recovery:
            unlike = sent[-1].pid
            await asyncio.to_thread(deployment.shard, planned.rank, unlike=unlike)
        await asyncio.sleep(planned.delay_seconds)
        num_tokens = clients.num_tokens
        at, pid = await asyncio.to_thread(
            deployment.send_signal, planned.rank, planned.number, unlike=unlike
        )
        sent.append(SentSignal(planned, at, pid, num_tokens))
    return sent


def measure(sent: Sequence[SentSignal], answers: Sequence[Answer], deployment: Deployment) -> None:
    """Fill in what each signal cost, from the clients' arrivals and the log.

    Where a signal was sent during the recovery from another, the recovery is measured from the later one.
    """
    to_unix = time.time() - time.perf_counter()
    lines = deployment.lines()
    streams = [answer.arrivals for answer in answers]
    arrivals = [at for stream in streams for at in stream]
    ends = [each.at for each in sent[1:]] + [max(arrivals, default=0.0) + 1e-6]
    for each, until in zip(sent, ends, strict=True):
        if any(other.planned.in_recovery and other.at == until for other in sent):
            continue
        resumed = pause_end(arrivals, since=each.at, until=until)
        if resumed is None:
            continue
        each.first_token = resumed - each.at
        moving = all_moving_at(streams, resumed=resumed, until=until)
        each.all_moving = None if moving is None else moving - each.at
        each.parts = parts(lines, since=each.at + to_unix, until=resumed + to_unix)
