"""Entries that have not been admitted to the batch yet, in order of priority and age."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from millrace_router.request.request import SchedulingParameters
from millrace_router.scheduler.deadlines import Deadlines, Perishable
from millrace_router.scheduler.ranking import Item, Ranking


class Waiting(Perishable, Protocol):
    """What a queue uses of an entry; none of it changes while the entry waits."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""


E = TypeVar("E", bound=Waiting)


class WaitingQueue(Generic[E]):
    """Entries in order of `queued_at - priority * ageing_seconds`, ties by `request_id`.

    A step of priority is worth `ageing_seconds` of waiting, so the order of two entries never changes. With equal
    priorities it is first come first served. Nothing starves: an entry of priority p is overtaken by none that came
    more than (10 - p) * `ageing_seconds` after it, and so by finitely many. One that comes back keeps its place.

    No operation but iteration costs more than some microseconds, however many wait. `deadlines`, where several queues
    share them, takes the place of `max_wait_seconds`.

    Raises:
        ValueError: a number of seconds is negative, or `ageing_seconds` is not finite.

    """

    def __init__(
        self,
        *,
        ageing_seconds: float = 10.0,
        max_wait_seconds: float | None = None,
        deadlines: Deadlines[E] | None = None,
    ) -> None:
        if not 0 <= ageing_seconds < math.inf:
            raise ValueError(f"ageing_seconds is {ageing_seconds}; it must be finite, not negative")
        self._ageing_seconds = ageing_seconds
        self._deadlines = Deadlines[E](max_wait_seconds) if deadlines is None else deadlines
        self._ranking = Ranking()
        self._entries: dict[float, tuple[Item, E]] = {}

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return self._ranking.weight

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[E]:
        """In the order of service; ends badly if the queue changes meanwhile."""
        for _, request_id, _ in self._ranking:
            yield self._entries[request_id][1]

    def append(self, entry: E) -> None:
        """Queue `entry` where its age and priority put it.

        Raises:
            ValueError: an entry of this id waits already.

        """
        if entry.request_id in self._entries:
            raise ValueError(f"request {entry.request_id} waits already")
        rank = self._rank(entry.scheduling, entry.queued_at)
        item = (rank, entry.request_id, entry.num_prompt_tokens)
        self._entries[entry.request_id] = item, entry
        self._ranking.add(item)
        self._deadlines.add(entry)

    def head(self) -> E | None:
        """The entry to admit next."""
        first = self._ranking.first()
        return None if first is None else self._entries[first[1]][1]

    def pop(self) -> E:
        """Take the head out.

        Raises:
            IndexError: nothing waits.

        """
        entry = self.head()
        if entry is None:
            raise IndexError("pop from an empty queue")
        self.discard(entry)
        return entry

    def discard(self, entry: E) -> bool:
        """Take `entry` out wherever it stands; whether it was there."""
        item, waiting = self._entries.get(entry.request_id, (None, None))
        if item is None or waiting is not entry:
            return False
        del self._entries[entry.request_id]
        self._ranking.remove(item)
        self._deadlines.discard(entry)
        return True

    def ahead(self, scheduling: SchedulingParameters, now: float) -> tuple[int, int]:
        """Entries, and their prompt tokens, served before a request with `scheduling` that would be appended `now`."""
        return self._ranking.before(self._rank(scheduling, now))

    def expired(self, now: float) -> list[E]:
        """Take out the entries that have waited for too long, the most overdue first."""
        expired = self._deadlines.take_expired(now)
        for entry in expired:
            self.discard(entry)
        return expired

    def served(self, entry: E, num_tokens: int) -> None:
        """Hear of tokens generated for an entry that was popped; they change nothing here."""

    def _rank(self, scheduling: SchedulingParameters, queued_at: float) -> float:
        return queued_at - scheduling.priority * self._ageing_seconds
