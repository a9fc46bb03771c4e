"""Requests that leave the batch for another adapter to get their adapter's room."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.queue.tenants import RequestQueue
from millrace_router.scheduler.row import Row


class Expulsion:
    """The adapters that make room, and the requests that have left the batch for that."""

    def __init__(self) -> None:
        self.digests: Collection[str] = ()
        """Digests of the adapters; set before a plan."""
        self._withdrawn: list[SchedulableRequest] = []

    def names(self, request: SchedulableRequest) -> bool:
        """Whether a request has to leave."""
        return request.adapter is not None and request.adapter.digest in self.digests

    def take_rows(self, rows: Iterable[Row], padding: Container[int]) -> list[Row]:
        """Return the rows to preempt. A row first yields a token, so that its request gets on in every admission."""
        found = [
            row
            for row in rows
            if 0 < row.num_tokens_planned < row.max_tokens
            and row.slot not in padding
            and self.names(row.entry)
        ]
        for row in found:
            row.has_yielded = True
        return found

    def requeue(self, yielded: list[Row], waiting: RequestQueue) -> None:
        """Put the requests of preempted rows back into the queue, or among those that have left."""
        for row in yielded:
            if self.names(row.entry):
                self.withdraw([row.entry])
            elif not row.entry.closed:
                waiting.append(row.entry)
        yielded.clear()

    def withdraw(self, requests: Iterable[SchedulableRequest]) -> None:
        """Add requests that have left; those whose clients have left are forgotten."""
        self._withdrawn += [request for request in requests if not request.closed]

    def take(self) -> list[SchedulableRequest]:
        """Remove and return the requests that have left; no step in flight computes them."""
        taken, self._withdrawn = self._withdrawn, []
        return taken
