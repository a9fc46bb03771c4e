"""Requests that wait for their adapter, outside the queue, so that no other request waits behind them."""

from __future__ import annotations

from collections.abc import Iterator

from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.queue import Deadlines


class AdapterWaiting:
    """Requests by the digest of their adapter, in order of arrival, with their deadlines."""

    def __init__(self, max_wait_seconds: float | None = None) -> None:
        self._deadlines = Deadlines(max_wait_seconds)
        self._requests: dict[str, dict[int, SchedulableRequest]] = {}
        """By digest and request id."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SchedulableRequest]:
        """Adapter by adapter; nothing may change meanwhile."""
        for requests in self._requests.values():
            yield from requests.values()

    @property
    def next_deadline(self) -> float | None:
        """When the first of them has waited for too long."""
        return self._deadlines.next

    def park(self, request: SchedulableRequest) -> None:
        """Add a request with an adapter."""
        self._requests.setdefault(_digest(request), {})[request.request_id] = request
        self._length += 1
        self._deadlines.add(request)

    def discard(self, request: SchedulableRequest) -> bool:
        """Take a request out; whether it waited."""
        requests = self._requests.get(_digest(request), {})
        if requests.get(request.request_id) is not request:
            return False
        self._remove(request)
        return True

    def take(self, digest: str) -> list[SchedulableRequest]:
        """Take out all requests for an adapter."""
        taken = list(self._requests.get(digest, {}).values())
        for request in taken:
            self._remove(request)
        return taken

    def expired(self, now: float) -> list[SchedulableRequest]:
        """The requests that have waited for too long; they stay until they are discarded."""
        return self._deadlines.take_expired(now)

    def _remove(self, request: SchedulableRequest) -> None:
        digest = _digest(request)
        requests = self._requests[digest]
        del requests[request.request_id]
        if not requests:
            del self._requests[digest]
        self._length -= 1
        self._deadlines.discard(request)


def _digest(request: SchedulableRequest) -> str:
    assert request.adapter is not None
    return request.adapter.digest
