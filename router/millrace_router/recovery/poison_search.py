"""Finds the poison request, which breaks its steps, by bisection of the requests of a failed step."""

from __future__ import annotations

from collections.abc import Mapping


class PoisonSearch:
    """The suspects: ids of requests of a failed step that have not passed the position at which that step failed.

    After a first failure all suspects run again together and without other requests, because a process that was
    killed from outside is the likelier cause. If that fails too, they run in halves, and a half that fails is halved
    again. A request whose step fails alone is a poison request. Among n suspects, one poison request is found after
    at most 3 + ceil(log2(n)) failures, or 2 if n is 1.

    If both halves of a failed group succeed, the cause was outside, or the fault takes several requests. Then all
    requests run as before, but a searched request is not searched again. If searched requests fail together twice
    more, all that failed with them run *separately*: each to its end, and never more at once than half of the last
    failed group. So a fault that occurs whenever some of n requests run together ends after 2 + 2 ceil(log2(n))
    failures, without a poison request.
    """

    def __init__(self) -> None:
        self._targets: dict[int, int] = {}
        """Suspects, and the number of KV positions that clears each; the most senior first."""
        self._group: list[int] = []
        """Suspects, or separate requests, that run now."""
        self._rest: list[int] = []
        """The half that contains the poison request if the group does not."""
        self._has_halved = False
        """Whether the suspects were halved, and no poison request was found since."""
        self._searched: set[int] = set()
        """Live requests that were halved; empty after a poison request is found, because it explains the failures."""
        self._separate: list[int] = []
        """Requests that run separately until they end; the most senior first."""
        self._max_together = 0
        """The largest number of separate requests in the group."""

    def __bool__(self) -> bool:
        return self.count > 0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._targets or request_id in self._separate

    @property
    def count(self) -> int:
        """The number of suspects or of separate requests."""
        return len(self._separate or self._targets)

    @property
    def group(self) -> frozenset[int]:
        """The only requests that may run now; empty if all may."""
        return frozenset(self._group)

    def fail(self, positions: Mapping[int, int]) -> int | None:
        """Record a failed step; returns the poison request once it is identified, which ends the suspicion against it.

        `positions` has the requests of the step, the most senior first, each with its number of KV positions after
        the step.
        """
        failed = [request_id for request_id in self._group if request_id in positions]
        if not failed:
            self._end()
            self._targets, self._group = dict(positions), list(positions)
            return None
        is_first = self._targets.keys().isdisjoint(failed)
        for request_id in failed:
            self._targets[request_id] = max(self._targets.get(request_id, 0), positions[request_id])
        if is_first:
            # Separate requests that passed the earlier failures: a kill from outside is the likelier cause.
            return None
        if len(positions) == 1:
            return self._found(failed[0])
        if self._separate or not (self._has_halved or self._searched.isdisjoint(failed)):
            self._part(failed)
        else:
            self._has_halved = True
            self._searched.update(failed)
            self._halve(failed)
        return None

    def computed(self, request_id: int, num_positions: int) -> bool:
        """Record a request's number of KV positions, which may clear it; return whether another group runs next."""
        if num_positions < self._targets.get(request_id, num_positions + 1):
            return False
        if request_id in self._separate:
            del self._targets[request_id]
            return False
        return self._leave(request_id)

    def ended(self, request_id: int) -> bool:
        """Record the end of a request; whether another group runs next."""
        self._searched.discard(request_id)
        return request_id in self and self._leave(request_id)

    def _leave(self, request_id: int) -> bool:
        self._forget(request_id)
        if self._group:
            return False
        self._next()
        return True

    def _found(self, poison_id: int) -> int:
        self._forget(poison_id)
        self._has_halved = False
        self._searched.clear()
        if self._separate:
            self._end()
        else:
            self._next()
        return poison_id

    def _forget(self, request_id: int) -> None:
        self._targets.pop(request_id, None)
        for ids in (self._group, self._rest, self._separate):
            if request_id in ids:
                ids.remove(request_id)

    def _next(self) -> None:
        """Choose the next group: separate requests, the other half, or all remaining suspects."""
        if self._separate:
            self._group = self._separate[: self._max_together]
        elif self._rest:
            self._halve(self._rest)
        elif self._has_halved:
            self._end()
        else:
            self._group = list(self._targets)

    def _halve(self, ids: list[int]) -> None:
        middle = (len(ids) + 1) // 2
        self._group, self._rest = ids[:middle], ids[middle:]

    def _part(self, failed: list[int]) -> None:
        """Run all suspects separately, at most half as many at once as failed together."""
        self._separate = self._separate or list(self._targets)
        self._max_together = (len(failed) + 1) // 2
        self._group, self._rest = self._separate[: self._max_together], []

    def _end(self) -> None:
        """End the search without a poison request."""
        self._targets.clear()
        self._group, self._rest, self._separate = [], [], []
        self._has_halved = False
