"""Requests that wait for their adapter, outside the queue, so that no other request waits behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, repeat

from millrace_router.adapters.residency import Changes, Residency
from millrace_router.adapters.slots import AdapterSlot
from millrace_router.request.adapter import PAGE_BYTES, AdapterVersion
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.queue import Deadlines, RequestQueue
from millrace_router.scheduler.step_plan import StepPlan


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
        """Return the requests that have waited for too long; they stay until they are discarded."""
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


class AdapterAdmission:
    """Lets requests into the queue once their adapter is resident. No I/O, no clock.

    A slot has as users its requests, from the moment at which they may join the queue until they end, and the
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
        self._users: dict[int, tuple[SchedulableRequest, AdapterSlot]] = {}
        """The requests that may run, by request id."""
        self._sequences: dict[int, AdapterSlot] = {}
        """Adapter slots of the sequences on the shards, by the slot of the sequence."""
        self._retiring: deque[tuple[int, AdapterSlot]] = deque()
        """(step that drops a sequence, slot)."""

    @property
    def is_settled(self) -> bool:
        """Whether the shards have answered every step that dropped a sequence."""
        return not self._retiring

    @property
    def running_names(self) -> set[str]:
        """Names, as the requests have them, of the adapters of requests that may run."""
        return {one.adapter.name for one, _ in self._users.values() if one.adapter is not None}

    def num_pages(self, version: AdapterVersion) -> int:
        """Return the pages that `version` takes on each rank."""
        return version.num_pages(self._bytes_per_slice)

    def submit(self, request: SchedulableRequest) -> bool:
        """Queue a request, or let it wait for its adapter; whether it is queued. `advance` has to follow."""
        version = request.adapter
        if version is not None:
            slot = self.residency.request(version, self.num_pages(version))
            if slot is None:
                request.adapter_slot = 0
                self.waiting.park(request)
                return False
            self._use(request, slot)
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
        for slot in changes.opened:
            self._join(slot)
        expelled = {slot.digest for slot in self.residency if slot.is_expelled}
        if expelled != self.expelled:
            self.expelled = expelled
            for request in list(self._queue):
                if request.adapter is not None and request.adapter.digest in expelled:
                    self._queue.discard(request)
                    self.wait_again(request)
        return changes

    def wait_again(self, request: SchedulableRequest) -> None:
        """A request has left the batch, or the queue, for its adapter to make room; no later step names it."""
        self._release(request)
        self.submit(request)

    def loaded(self, slot: AdapterSlot, now: float) -> list[SchedulableRequest]:
        """All ranks have loaded a slot: its waiting requests join the queue, and are returned."""
        self.residency.loaded(slot, now)
        return self._join(slot)

    def failed(self, slot: AdapterSlot) -> list[SchedulableRequest]:
        """Return the requests that end because a load failed; after a restart, queued and admitted ones too."""
        self.residency.failed(slot)
        users = [request for request, used in self._users.values() if used is slot]
        for request in users:
            self._queue.discard(request)
            self._release(request)
        return [*users, *self.waiting.take(slot.digest)]

    def sent(self, plan: StepPlan, number: int) -> None:
        """Count the sequences that a step admits, and those that are gone once it is answered."""
        for row_slot in plan.dropped:
            slot = self._sequences.pop(row_slot, None)
            if slot is not None:
                self._retiring.append((number, slot))
        for row in plan.admitted:
            if row.entry.adapter is not None:
                _, slot = self._users[row.entry.request_id]
                self.residency.hold(slot)
                self._sequences[row.slot] = slot
        if self._sequences:
            self.count_load(plan)

    def count_load(self, plan: StepPlan) -> None:
        """Count the adapters of a step in its load."""
        sequences, load, used = self._sequences, plan.load, set[AdapterSlot]()
        for row_slot, num_tokens in chain(plan.chunks, zip(plan.decodes, repeat(1), strict=False)):
            slot = sequences.get(row_slot)
            if slot is not None:
                used.add(slot)
                load.adapter_slices += num_tokens * slot.num_slices
        load.adapter_bytes = PAGE_BYTES * sum(slot.num_pages for slot in used)

    def answered(self, number: int) -> bool:
        """Release the slots of sequences that are gone; whether there were any."""
        released = False
        while self._retiring and self._retiring[0][0] <= number:
            self.residency.release(self._retiring.popleft()[1])
            released = True
        return released

    def restarted(self) -> list[AdapterSlot]:
        """Forget the sequences of an epoch that has ended; return the slots to load before the first step."""
        for slot in (*self._sequences.values(), *(slot for _, slot in self._retiring)):
            self.residency.release(slot)
        self._sequences.clear()
        self._retiring.clear()
        self.expelled = set()
        return self.residency.restarted()

    def _join(self, slot: AdapterSlot) -> list[SchedulableRequest]:
        joining = self.waiting.take(slot.digest)
        for request in joining:
            self._use(request, slot)
            self._queue.append(request)
        return joining

    def _use(self, request: SchedulableRequest, slot: AdapterSlot) -> None:
        self._users[request.request_id] = request, slot
        request.adapter_slot = slot.number

    def _release(self, request: SchedulableRequest) -> None:
        user = self._users.pop(request.request_id, None)
        if user is not None:
            self.residency.release(user[1])
