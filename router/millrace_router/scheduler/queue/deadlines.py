"""When waiting requests expire."""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from millrace_router.request.schedulable import SchedulableRequest


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
        """The soonest deadline."""
        return self._order[0][0] if self._order else None

    def add(self, request: SchedulableRequest) -> None:
        """Watch `request`, if it has a deadline."""
        deadline = self._deadline(request)
        if deadline < math.inf and not request.num_preemptions:
            insort(self._order, (deadline, request.request_id))
            self._requests[request.request_id] = request

    def discard(self, request: SchedulableRequest) -> None:
        """Stop watching `request`."""
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
