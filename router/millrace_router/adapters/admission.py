"""Admits requests with adapters: each waits for a place in the shards' memory, joins the queue, and keeps the place."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import chain, repeat

from millrace_router.adapters.place import Place
from millrace_router.adapters.residency import Changes, Residency
from millrace_router.adapters.waiting import AdapterWaiting
from millrace_router.request.adapter import PAGE_BYTES, AdapterVersion
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import StepPlan


class AdapterAdmission:
    """Lets requests into the queue once their adapter is resident. No I/O, no clock.

    A place has as users its requests, from the moment at which they may join the queue until they end, and the
    sequences of the shards, from the step that admits them until the one that drops them is answered.
    """

    def __init__(
        self,
        residency: Residency,
        queue: RequestQueue,
        *,
        bytes_per_slice: Mapping[str, int],
        max_wait_seconds: float | None = None,
    ) -> None:
        """`bytes_per_slice` is by module, for the rank where it is most."""
        self.residency = residency
        self.waiting = AdapterWaiting(max_wait_seconds)
        self.expelled: set[str] = set()
        """Digests whose requests have to leave the batch and the queue."""
        self._queue = queue
        self._bytes_per_slice = bytes_per_slice
        self._users: dict[int, tuple[SchedulableRequest, Place]] = {}
        """The requests that may run, by request id."""
        self._sequences: dict[int, Place] = {}
        """Places of the sequences on the shards, by slot."""
        self._retiring: deque[tuple[int, Place]] = deque()
        """(step that drops a sequence, place)."""

    @property
    def is_settled(self) -> bool:
        """Whether the shards have answered every step that dropped a sequence."""
        return not self._retiring

    @property
    def running_names(self) -> set[str]:
        """Names, as the requests have them, of the adapters of requests that may run."""
        return {one.adapter.name for one, _ in self._users.values() if one.adapter is not None}

    def num_pages(self, version: AdapterVersion) -> int:
        """The pages that `version` takes on each rank."""
        return version.num_pages(self._bytes_per_slice)

    def submit(self, request: SchedulableRequest, now: float) -> bool:
        """Queue a request, or let it wait for its adapter; whether it is queued. `advance` has to follow."""
        version = request.adapter
        if version is not None:
            place = self.residency.request(version, self.num_pages(version), now)
            if place is None:
                request.adapter_slot = 0
                self.waiting.park(request)
                return False
            self._use(request, place)
        self._queue.append(request)
        return True

    def ended(self, request: SchedulableRequest) -> None:
        """Forget a request with an adapter, which has ended or whose client has left."""
        assert request.adapter is not None
        if self.waiting.discard(request):
            self.residency.leave(request.adapter.digest)
        else:
            self._release(request)

    def advance(self, now: float) -> Changes:
        """Decide what changes; requests join the queue or leave it accordingly."""
        changes = self.residency.advance(now)
        for place in changes.opened:
            self._join(place)
        expelled = {place.digest for place in self.residency if place.is_expelled}
        if expelled != self.expelled:
            self.expelled = expelled
            for request in list(self._queue):
                if request.adapter is not None and request.adapter.digest in expelled:
                    self._queue.discard(request)
                    self.wait_again(request, now)
        return changes

    def wait_again(self, request: SchedulableRequest, now: float) -> None:
        """A request has left the batch, or the queue, for its adapter to make room; no later step names it."""
        self._release(request)
        self.submit(request, now)

    def loaded(self, place: Place, now: float) -> list[SchedulableRequest]:
        """All ranks have loaded a place: its waiting requests join the queue, and are returned."""
        self.residency.loaded(place, now)
        return self._join(place)

    def failed(self, place: Place) -> list[SchedulableRequest]:
        """Return the requests that end because a load failed; after a restart, queued and admitted ones too."""
        self.residency.failed(place)
        users = [request for request, used in self._users.values() if used is place]
        for request in users:
            self._queue.discard(request)
            self._release(request)
        return [*users, *self.waiting.take(place.digest)]

    def sent(self, plan: StepPlan, number: int) -> None:
        """Count the sequences that a step admits, and those that are gone once it is answered."""
        for slot in plan.dropped:
            place = self._sequences.pop(slot, None)
            if place is not None:
                self._retiring.append((number, place))
        for row in plan.admitted:
            if row.entry.adapter is not None:
                _, place = self._users[row.entry.request_id]
                self.residency.hold(place)
                self._sequences[row.slot] = place
        if self._sequences:
            self.count_load(plan)

    def count_load(self, plan: StepPlan) -> None:
        """Count the adapters of a step in its load."""
        sequences, load, used = self._sequences, plan.load, set[Place]()
        for slot, num_tokens in chain(plan.chunks, zip(plan.decodes, repeat(1), strict=False)):
            place = sequences.get(slot)
            if place is not None:
                used.add(place)
                load.adapter_slices += num_tokens * place.num_slices
        load.adapter_bytes = PAGE_BYTES * sum(place.num_pages for place in used)

    def answered(self, number: int) -> bool:
        """Release the places of sequences that are gone; whether there were any."""
        released = False
        while self._retiring and self._retiring[0][0] <= number:
            self.residency.release(self._retiring.popleft()[1])
            released = True
        return released

    def restarted(self) -> list[Place]:
        """Forget the sequences of an epoch that has ended; return the places to load before the first step."""
        for place in (*self._sequences.values(), *(place for _, place in self._retiring)):
            self.residency.release(place)
        self._sequences.clear()
        self._retiring.clear()
        self.expelled = set()
        return self.residency.restarted()

    def _join(self, place: Place) -> list[SchedulableRequest]:
        joining = self.waiting.take(place.digest)
        for request in joining:
            self._use(request, place)
            self._queue.append(request)
        return joining

    def _use(self, request: SchedulableRequest, place: Place) -> None:
        self._users[request.request_id] = request, place
        request.adapter_slot = place.slot

    def _release(self, request: SchedulableRequest) -> None:
        user = self._users.pop(request.request_id, None)
        if user is not None:
            self.residency.release(user[1])
