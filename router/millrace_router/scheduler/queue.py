"""Requests that wait for admission: the interface of a queue, and the order by priority and age."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator

from typing_extensions import override

from millrace_router.request.request import SchedulingParameters
from millrace_router.request.schedulable import SchedulableRequest


class RequestQueue(ABC):
    """Requests that wait for admission, in an order of service that admission does not know."""

    num_prompt_tokens: int
    """Prompt tokens of all waiting requests."""
    _deadlines: Deadlines

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of waiting requests."""

    @abstractmethod
    def __iter__(self) -> Iterator[SchedulableRequest]:
        """Yield every waiting request; the queue must not change meanwhile."""

    @abstractmethod
    def append(self, request: SchedulableRequest) -> None:
        """Queue `request`.

        Raises:
            ValueError: a request of this id waits already.

        """

    @abstractmethod
    def head(self) -> SchedulableRequest | None:
        """Return the request to admit next; the same until the queue changes or tokens are charged."""

    @abstractmethod
    def shortest(self) -> SchedulableRequest | None:
        """Return the request with the shortest prompt among those that may be computed out of turn."""

    @abstractmethod
    def pop(self) -> SchedulableRequest:
        """Take the head out.

        Raises:
            IndexError: nothing waits.

        """

    @abstractmethod
    def take(self, request: SchedulableRequest) -> None:
        """Take out `request`, which waits, ahead of its turn."""

    @abstractmethod
    def discard(self, request: SchedulableRequest) -> bool:
        """Take `request` out, at no charge; whether it was in the queue."""

    @abstractmethod
    def ahead(self, scheduling: SchedulingParameters, now: float) -> tuple[int, int]:
        """Number and prompt tokens of the requests that are served before one with `scheduling` that comes `now`."""

    def expired(self, now: float) -> list[SchedulableRequest]:
        """Take out the requests that have waited for too long, the most overdue first."""
        expired = self._deadlines.take_expired(now)
        for request in expired:
            self.discard(request)
        return expired

    @abstractmethod
    def served(self, request: SchedulableRequest, num_tokens: int) -> None:
        """Charge `num_tokens`, generated for `request`, which was popped."""


class WaitingQueue(RequestQueue):
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

    @override
    def __len__(self) -> int:
        return len(self._order)

    @override
    def __iter__(self) -> Iterator[SchedulableRequest]:
        """In order of service; the queue must not change meanwhile."""
        return (self._requests[request_id] for _, request_id in self._order)

    @override
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

    @override
    def head(self) -> SchedulableRequest | None:
        return self._requests[self._order[0][1]] if self._order else None

    @override
    def shortest(self) -> SchedulableRequest | None:
        """Return the request with the shortest prompt among the ones of highest priority."""
        return self._requests[self._by_length[0][-1]] if self._by_length else None

    @override
    def pop(self) -> SchedulableRequest:
        request = self.head()
        if request is None:
            raise IndexError("pop from an empty queue")
        self.discard(request)
        return request

    @override
    def take(self, request: SchedulableRequest) -> None:
        assert self.discard(request)

    @override
    def discard(self, request: SchedulableRequest) -> bool:
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

    @override
    def ahead(self, scheduling: SchedulingParameters, now: float) -> tuple[int, int]:
        number = bisect_left(self._order, (self._rank(scheduling, now), math.inf))
        if number == len(self._order):
            return number, self.num_prompt_tokens
        first = (self._requests[request_id] for _, request_id in self._order[:number])
        return number, sum(request.num_prompt_tokens for request in first)

    @override
    def served(self, request: SchedulableRequest, num_tokens: int) -> None:
        """Charge generated tokens to a request that was popped; this changes nothing here."""

    def _length_key(self, request: SchedulableRequest) -> tuple[int, int, float, float]:
        scheduling = request.scheduling
        rank = self._rank(scheduling, request.queued_at)
        return -scheduling.priority, request.num_prompt_tokens, rank, request.request_id

    def _rank(self, scheduling: SchedulingParameters, queued_at: float) -> float:
        return queued_at - scheduling.priority * self._ageing_seconds


class Deadlines:
    """The deadlines of waiting requests, soonest first; several queues may share one.

    A request may wait for its `max_queue_seconds`, and no longer than `max_wait_seconds`. A preempted request has no
    deadline: it has left the queue in time once, and preemption must not fail it.

    Raises:
        ValueError: `max_wait_seconds` is negative.

    """

    def __init__(self, max_wait_seconds: float | None = None) -> None:
        if max_wait_seconds is not None and not max_wait_seconds >= 0:
            raise ValueError(f"max_wait_seconds is {max_wait_seconds}; it must not be negative")
        self._max_wait_seconds = math.inf if max_wait_seconds is None else max_wait_seconds
        self._order: list[tuple[float, int]] = []
        """(deadline, request id)."""
        self._requests: dict[int, SchedulableRequest] = {}

    @property
    def next(self) -> float | None:
        return self._order[0][0] if self._order else None

    def add(self, request: SchedulableRequest) -> None:
        """Watch `request`, if it has a deadline."""
        deadline = self._deadline(request)
        if deadline < math.inf and not request.num_preemptions:
            insort(self._order, (deadline, request.request_id))
            self._requests[request.request_id] = request

    def discard(self, request: SchedulableRequest) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            del self._order[bisect_left(self._order, (self._deadline(request), request.request_id))]

    def take_expired(self, now: float) -> list[SchedulableRequest]:
        """Stop watching the requests whose deadline has passed, and return them, soonest first."""
        number = bisect_left(self._order, (now, -1))
        expired = [self._requests.pop(request_id) for _, request_id in self._order[:number]]
        del self._order[:number]
        return expired

    def _deadline(self, request: SchedulableRequest) -> float:
        own = request.scheduling.max_queue_seconds
        seconds = self._max_wait_seconds if own is None else min(own, self._max_wait_seconds)
        return request.queued_at + seconds
