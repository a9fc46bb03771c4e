"""Until when waiting entries are worth serving."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from millrace_router.request.request import SchedulingParameters
from millrace_router.scheduler.ranking import Item, Ranking


class Perishable(Protocol):
    """What a deadline depends on."""

    @property
    def request_id(self) -> int:
        """Distinct among those that wait."""

    @property
    def queued_at(self) -> float:
        """When it was accepted, in monotonic seconds; stays the same when it waits again."""

    @property
    def scheduling(self) -> SchedulingParameters:
        """When it wants to be served."""

    @property
    def num_preemptions(self) -> int:
        """How often it has been admitted and then sent back to wait."""


E = TypeVar("E", bound=Perishable)


class Deadlines(Generic[E]):
    """The entries that may wait for too long, by when they have; one queue's, or shared by several.

    An entry may wait for its `max_queue_seconds`, and no longer than `max_wait_seconds`. One that was preempted has
    left the queue in time once: it has no deadline, since preemption must not fail a request.

    Raises:
        ValueError: `max_wait_seconds` is negative.

    """

    def __init__(self, max_wait_seconds: float | None = None) -> None:
        if max_wait_seconds is not None and not max_wait_seconds >= 0:
            raise ValueError(f"max_wait_seconds is {max_wait_seconds}; it must not be negative")
        self._max_wait_seconds = max_wait_seconds
        self._ranking = Ranking()
        self._entries: dict[float, tuple[Item, E]] = {}

    def add(self, entry: E) -> None:
        """Watch `entry`, if it has a deadline."""
        limits = (entry.scheduling.max_queue_seconds, self._max_wait_seconds)
        seconds = min((limit for limit in limits if limit is not None), default=None)
        if seconds is not None:
            item = (entry.queued_at + seconds, entry.request_id, 0)
            self._ranking.add(item)
            self._entries[entry.request_id] = item, entry

    def discard(self, entry: E) -> None:
        """Watch `entry` no longer."""
        found = self._entries.pop(entry.request_id, None)
        if found is not None:
            self._ranking.remove(found[0])

    def take_expired(self, now: float) -> list[E]:
        """Those whose deadline has passed, soonest first; they are watched no longer."""
        expired: list[E] = []
        while (first := self._ranking.first()) is not None and first[0] < now:
            self._ranking.remove(first)
            _, entry = self._entries.pop(first[1])
            if not entry.num_preemptions:
                expired.append(entry)
        return expired
