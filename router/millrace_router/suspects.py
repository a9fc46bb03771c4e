"""Which request breaks steps: found by running halves of those that were in a failed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Suspects(Generic[T]):
    """Entries that were in a failed step, until each has got past the position at which that step failed.

    After a first failure all of them run again together, and nobody else: a process that was killed from outside is
    the likelier cause. If that fails too, they run in halves, the one that breaks being halved again; who breaks a
    step all alone is guilty. One guilty entry among n is found with at most 3 + ceil(log2(n)) failures, two if n is 1.
    """

    def __init__(self) -> None:
        self._targets: dict[T, int] = {}
        """Who is not cleared, and the number of KV positions that will clear him; most senior first."""
        self._group: list[T] = []
        """Who of them runs now."""
        self._rest: list[T] = []
        """Where the guilty one is if it is not in the group."""

    def __bool__(self) -> bool:
        return bool(self._targets)

    def __contains__(self, entry: T) -> bool:
        return entry in self._targets

    @property
    def count(self) -> int:
        """How many are not cleared."""
        return len(self._targets)

    @property
    def group(self) -> frozenset[T]:
        """Who may run now; nobody else may, unless this is empty."""
        return frozenset(self._group)

    def failed(self, named: Mapping[T, int]) -> T | None:
        """A step has failed that named these entries, each with the KV positions it would have had after it.

        Returns the one that is proven guilty, who is a suspect no more. `named` is ordered by seniority.
        """
        found = [entry for entry in self._group if entry in named]
        if not found:
            self._targets = dict(named)
            self._group, self._rest = list(named), []
            return None
        for entry in found:
            self._targets[entry] = max(self._targets[entry], named[entry])
        if len(named) == 1:
            guilty = found[0]
            self._forget(guilty)
            self._next()
            return guilty
        self._halve(found)
        return None

    def computed(self, entry: T, num_positions: int) -> bool:
        """`entry` has so many KV positions; as `cleared` if those are enough."""
        return num_positions >= self._targets.get(entry, num_positions + 1) and self.cleared(entry)

    def cleared(self, entry: T) -> bool:
        """`entry` has got past its position, or has ended; whether others are to run now."""
        if entry not in self._targets:
            return False
        self._forget(entry)
        if self._group:
            return False
        self._next()
        return True

    def _forget(self, entry: T) -> None:
        del self._targets[entry]
        for entries in (self._group, self._rest):
            if entry in entries:
                entries.remove(entry)

    def _next(self) -> None:
        """The group is done with: its other half is next, then whoever is left, together."""
        if self._rest:
            self._halve(self._rest)
        else:
            self._group = list(self._targets)

    def _halve(self, entries: list[T]) -> None:
        middle = (len(entries) + 1) // 2
        self._group, self._rest = entries[:middle], entries[middle:]
