"""The requests of a cell: a list with times, or clients that wait for their answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from millrace_router.simulator.simulated_request import Arrival
from millrace_router.simulator.workload import Requester


class Source(Protocol):
    """Requests in order of time."""

    @property
    def next_at(self) -> float:
        """When the next request arrives; infinity if none does before another one ends."""

    @property
    def waits_for_answers(self) -> bool:
        """Whether the end of a request may bring the next one."""

    def take(self) -> Arrival:
        """The next request."""

    def left(self, now: float) -> None:
        """A request has ended, or was refused."""


class OpenLoop:
    """Requests that arrive at given times, whether others end or not."""

    waits_for_answers = False

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self._next = next(arrivals, None)

    @property
    def next_at(self) -> float:
        """When the next request arrives."""
        return math.inf if self._next is None else self._next.arrived_at

    def take(self) -> Arrival:
        """The next request."""
        taken = self._next
        assert taken is not None
        self._next = next(self._arrivals, None)
        return taken

    def left(self, now: float) -> None:
        """Do nothing."""


class ClosedLoop:
    """Clients that each send one request after the other; a refused client goes on with its next request."""

    waits_for_answers = True

    def __init__(
        self, draw: Requester, *, requests: int, clients: int, think_seconds: float
    ) -> None:
        self._draw = draw
        self._num_left = requests
        self._ready = [0.0] * clients
        self._think_seconds = think_seconds
        heapify(self._ready)

    @property
    def next_at(self) -> float:
        """When the next client is ready."""
        return self._ready[0] if self._ready and self._num_left else math.inf

    def take(self) -> Arrival:
        """The request of the next client."""
        self._num_left -= 1
        return self._draw.request(heappop(self._ready))

    def left(self, now: float) -> None:
        """Its client thinks, and is ready again."""
        heappush(self._ready, now + self._think_seconds)
