"""What the batcher asks of whatever decides the order of service."""

from __future__ import annotations

from typing import Protocol

from millrace_router.request.entry import Entry
from millrace_router.request.request import SchedulingParameters
from millrace_router.scheduler.admission import Waiting


class EntryQueue(Waiting[Entry], Protocol):
    """Entries that wait; `WaitingQueue` and `TenantQueue` are such."""

    def append(self, entry: Entry) -> None:
        """Queue `entry` by its scheduling parameters."""

    def discard(self, entry: Entry) -> bool:
        """Take `entry` out wherever it stands; whether it was there."""

    def ahead(self, scheduling: SchedulingParameters, now: float) -> tuple[int, int]:
        """Entries, and their prompt tokens, served before a request with `scheduling` that would be appended `now`."""

    def expired(self, now: float) -> list[Entry]:
        """Take out, and return, the entries that have waited for too long."""

    def served(self, entry: Entry, num_tokens: int) -> None:
        """Hear of tokens generated for an entry that was popped."""
