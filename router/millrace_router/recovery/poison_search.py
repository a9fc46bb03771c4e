"""Which request breaks steps: found by running halves of those that were in a failed one."""

from __future__ import annotations

from collections.abc import Mapping


class PoisonSearch:
    """Ids of requests that were in a failed step, until each has got past the position at which that step failed.

    After a first failure all of them run again together, and nobody else: a process that was killed from outside is
    the likelier cause. If that fails too, they run in halves, the one that breaks being halved again; who breaks a
    step all alone is guilty. One guilty entry among n is found with at most 3 + ceil(log2(n)) failures, two if n is 1.

    A search is in vain where both halves of what broke run well: the cause was outside, or it takes several entries at
    once. Then everybody runs as before, but who was searched in vain is not searched again. If such entries fail
    together twice more, all that failed with them run *apart*: each to its end, and never more at once than half as
    many as failed last. So a fault that always comes when some of n run together ends after 2 + 2 ceil(log2(n))
    failures, and nobody is guilty of it.
    """

    def __init__(self) -> None:
        self._targets: dict[int, int] = {}
        """Who is not cleared, and the number of KV positions that will clear him; most senior first."""
        self._group: list[int] = []
        """Who runs now, of them or of those that run apart."""
        self._rest: list[int] = []
        """Where the guilty one is if it is not in the group."""
        self._has_halved = False
        """Whether the search has come to halves, and has found nobody since."""
        self._searched: set[int] = set()
        """Who was among those that were halved, and lives; empty once somebody is found guilty, which explains it."""
        self._apart: list[int] = []
        """Who runs to its end, cleared or not; most senior first."""
        self._most_together = 0
        """How many of those may be in the group."""

    def __bool__(self) -> bool:
        return self.count > 0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._targets or request_id in self._apart

    @property
    def count(self) -> int:
        """How many are not cleared, or run apart."""
        return len(self._apart or self._targets)

    @property
    def group(self) -> frozenset[int]:
        """Who may run now; nobody else may, unless this is empty."""
        return frozenset(self._group)

    def failed(self, named: Mapping[int, int]) -> int | None:
        """A step has failed that named these entries, each with the KV positions it would have had after it.

        Returns the one that is proven guilty, who is a suspect no more. `named` is ordered by seniority.
        """
        found = [entry for entry in self._group if entry in named]
        if not found:
            self._end()
            self._targets, self._group = dict(named), list(named)
            return None
        is_first = self._targets.keys().isdisjoint(found)
        for entry in found:
            self._targets[entry] = max(self._targets.get(entry, 0), named[entry])
        if is_first:
            # They run apart, and had got past what failed before: this may be a kill from outside.
            return None
        if len(named) == 1:
            return self._convict(found[0])
        if self._apart or not (self._has_halved or self._searched.isdisjoint(found)):
            self._part(found)
        else:
            self._has_halved = True
            self._searched.update(found)
            self._halve(found)
        return None

    def computed(self, request_id: int, num_positions: int) -> bool:
        """The request has so many KV positions, which may clear it; whether others are to run now."""
        if num_positions < self._targets.get(request_id, num_positions + 1):
            return False
        if request_id in self._apart:
            del self._targets[request_id]
            return False
        return self._leave(request_id)

    def ended(self, request_id: int) -> bool:
        """The request has ended, however it did; whether others are to run now."""
        self._searched.discard(request_id)
        return request_id in self and self._leave(request_id)

    def _leave(self, request_id: int) -> bool:
        self._forget(request_id)
        if self._group:
            return False
        self._next()
        return True

    def _convict(self, guilty: int) -> int:
        self._forget(guilty)
        self._has_halved = False
        self._searched.clear()
        if self._apart:
            self._end()
        else:
            self._next()
        return guilty

    def _forget(self, request_id: int) -> None:
        self._targets.pop(request_id, None)
        for ids in (self._group, self._rest, self._apart):
            if request_id in ids:
                ids.remove(request_id)

    def _next(self) -> None:
        """The group is done with: its other half is next, then whoever is left, together."""
        if self._apart:
            self._group = self._apart[: self._most_together]
        elif self._rest:
            self._halve(self._rest)
        elif self._has_halved:
            self._end()
        else:
            self._group = list(self._targets)

    def _halve(self, entries: list[int]) -> None:
        middle = (len(entries) + 1) // 2
        self._group, self._rest = entries[:middle], entries[middle:]

    def _part(self, found: list[int]) -> None:
        """Have all suspects run apart, so many of whom have failed together."""
        self._apart = self._apart or list(self._targets)
        self._most_together = (len(found) + 1) // 2
        self._group, self._rest = self._apart[: self._most_together], []

    def _end(self) -> None:
        """Nobody is under suspicion any more."""
        self._targets.clear()
        self._group, self._rest, self._apart = [], [], []
        self._has_halved = False
