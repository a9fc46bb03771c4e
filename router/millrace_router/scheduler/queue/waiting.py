"""Requests that wait for admission, in order of priority and age."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from millrace_router.request.request import SchedulingParameters
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.queue.deadlines import Deadlines


class WaitingQueue:
    """Requests in order of `queued_at - priority * ageing_seconds`, ties by `request_id`.

    A step of priority is worth `ageing_seconds` of waiting, so the order of two requests never changes. With equal
    priorities it is first come, first served. No request starves: one of priority p is overtaken by none that came
    more than (10 - p) * `ageing_seconds` after it. A request that comes back keeps its place.

    Queues that share `deadlines` have those in place of `max_wait_seconds`.

    Raises:
        ValueError: a number of seconds is negative, or `ageing_seconds` is not finite.

    """

    def __init__(
        self,
        *,
        ageing_seconds: float = 10.0,
        max_wait_seconds: float | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        if not 0 <= ageing_seconds < math.inf:
            raise ValueError(f"ageing_seconds is {ageing_seconds}; it must be finite, not negative")
        self.num_prompt_tokens = 0
        """Prompt tokens of all waiting requests."""
        self._ageing_seconds = ageing_seconds
        self._deadlines = Deadlines(max_wait_seconds) if deadlines is None else deadlines
        self._order: list[tuple[float, float]] = []
        """(rank, request id)."""
        self._by_length: list[tuple[int, int, float, float]] = []
        """(priority below 0, prompt tokens, rank, request id)."""
        self._requests: dict[float, SchedulableRequest] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[SchedulableRequest]:
        """In order of service; the queue must not change meanwhile."""
        return (self._requests[request_id] for _, request_id in self._order)

    def append(self, request: SchedulableRequest) -> None:
        """Queue `request` where its age and priority put it.

        Raises:
            ValueError: a request of this id waits already.

        """
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} waits already")
        self._requests[request.request_id] = request
        insort(self._order, (self._rank(request.scheduling, request.queued_at), request.request_id))
        insort(self._by_length, self._length_key(request))
        self.num_prompt_tokens += request.num_prompt_tokens
        self._deadlines.add(request)

    def head(self) -> SchedulableRequest | None:
        """The request to admit next."""
        return self._requests[self._order[0][1]] if self._order else None

    def shortest(self) -> SchedulableRequest | None:
        """The request with the shortest prompt among those of the highest priority."""
        return self._requests[self._by_length[0][-1]] if self._by_length else None

    def pop(self) -> SchedulableRequest:
        """Take the head out.

        Raises:
            IndexError: nothing waits.

        """
        request = self.head()
        if request is None:
            raise IndexError("pop from an empty queue")
        self.discard(request)
        return request

    def take(self, request: SchedulableRequest) -> None:
        """Take out `request`, which waits, ahead of its turn."""
        assert self.discard(request)

    def discard(self, request: SchedulableRequest) -> bool:
        """Take `request` out; whether it was in the queue."""
        request_id = request.request_id
        if self._requests.get(request_id) is not request:
            return False
        del self._requests[request_id]
        rank = self._rank(request.scheduling, request.queued_at)
        del self._order[bisect_left(self._order, (rank, request_id))]
        del self._by_length[bisect_left(self._by_length, self._length_key(request))]
        self.num_prompt_tokens -= request.num_prompt_tokens
        self._deadlines.discard(request)
        return True

    def ahead(self, scheduling: SchedulingParameters, now: float) -> tuple[int, int]:
        """Number and prompt tokens of the requests that are served before one with `scheduling` that comes `now`."""
        number = bisect_left(self._order, (self._rank(scheduling, now), math.inf))
        if number == len(self._order):
            return number, self.num_prompt_tokens
        first = (self._requests[request_id] for _, request_id in self._order[:number])
        return number, sum(request.num_prompt_tokens for request in first)

    def expired(self, now: float) -> list[SchedulableRequest]:
        """Take out the requests that have waited for too long, the most overdue first."""
        expired = self._deadlines.take_expired(now)
        for request in expired:
            self.discard(request)
        return expired

    def served(self, request: SchedulableRequest, num_tokens: int) -> None:
        """Charge generated tokens to a request that was popped; this changes nothing here."""

    def _length_key(self, request: SchedulableRequest) -> tuple[int, int, float, float]:
        scheduling = request.scheduling
        rank = self._rank(scheduling, request.queued_at)
        return -scheduling.priority, request.num_prompt_tokens, rank, request.request_id

    def _rank(self, scheduling: SchedulingParameters, queued_at: float) -> float:
        return queued_at - scheduling.priority * self._ageing_seconds
