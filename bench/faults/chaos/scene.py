"""The objects that injections of faults work on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from signal import Signals

import psutil

from bench.faults.adapters import CHANGING, Adapters
from bench.faults.chaos.campaign import Fault
from bench.faults.chaos.client import Client
from bench.faults.chaos.load import Load
from bench.faults.chaos.population import Request
from bench.faults.deployment import Deployment

POLL_SECONDS = 0.2


@dataclass(slots=True, kw_only=True)
class Scene:
    """The server, its clients and their requests."""

    server: Deployment
    client: Client
    load: Load
    adapters: Adapters
    requests: list[Request]
    """All requests of the population."""
    long: list[Request]
    """Streams that together need more KV blocks than there are."""
    unread: list[Request]
    """Streams with large answers."""
    adapted: dict[str, list[Request]]
    """Long streams by adapter."""
    max_concurrent: int
    """Requests that the server accepts at once."""
    versions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHANGING, 0))
    """The version of each changing adapter that was made current last."""
    held: list[socket.socket] = field(default_factory=list)
    """Connections of slow readers."""
    others: set[asyncio.Task[None]] = field(default_factory=set)
    """Client faults that continue during the next fault."""
    changes: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an adapter changes, so that each change is checked by itself."""


async def until(condition: Callable[[], bool], *, every: float = POLL_SECONDS) -> None:
    """Poll the condition on a thread, because it may block."""
    while True:
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(every)


def hit_by(scene: Scene, fault: Fault) -> set[int]:
    """Processes of the ranks that the fault hits."""
    ranks = scene.server.members().ranks
    return {pid for rank in fault.ranks for pid in ranks.get(rank, [])}


def send(pids: set[int], number: Signals) -> None:
    """Send a signal to the processes that are left."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(number)
