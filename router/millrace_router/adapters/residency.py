"""Which adapters the shards hold: slots, pages, evictions and turns. Pure decisions; no I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace_router.adapters.slots import AdapterSlot, PendingLoad, SlotBudget, SlotState
from millrace_router.request.adapter import AdapterVersion

MAX_LOADS = 4
"""Most loads at a time: each takes a worker of every shard, which answers health checks too."""
LEAST_CYCLE_SECONDS = 0.1
"""A shorter cycle would spend its time on loads."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The consequences of an event."""

    loads: list[AdapterSlot] = field(default_factory=list)
    """Slots to load now; `loaded` or `failed` reports the end."""
    unloads: list[AdapterSlot] = field(default_factory=list)
    """Slots to free now; `unloaded` reports the end."""
    opened: list[AdapterSlot] = field(default_factory=list)
    """Closed slots that are open again; their waiting requests are users now."""


class Residency:
    """The slots of adapters on the shards, and the versions that wait for one in the order of their first requests.

    A version with users is pinned. Space comes from idle slots first, the least recently used ones before others. If
    that is not enough, the slots that have been resident longest, and for a cycle at least, are closed: new requests
    wait. A slot that is still used a cycle later is expelled: its requests leave the batch, and wait again. No version
    overtakes one that waits for budget.

    So each wait is bounded. In a *turn*, the first waiting version gets a slot: the loads under way end, the youngest
    slot becomes a cycle old, a cycle later it is expelled, its rows leave, it is unloaded, and the version is loaded
    once another load has ended. `turn_seconds` is the sum. A version that finds n others waiting waits for n + 1 turns
    at most.
    """

    def __init__(
        self,
        *,
        max_adapters: int,
        num_pages: int,
        cycle_seconds: float,
        max_loads: int = MAX_LOADS,
    ) -> None:
        """Slots are 1 … `max_adapters`; `num_pages` is the number on the rank with the fewest."""
        self.num_pages = num_pages
        self.max_adapters = max_adapters
        self.cycle_seconds = max(cycle_seconds, LEAST_CYCLE_SECONDS)
        self._max_loads = max_loads
        self._num_loading = 0
        self._free_slots = list(range(max_adapters, 0, -1))
        self._free_pages = num_pages
        self._slots: dict[str, AdapterSlot] = {}
        self._idle: OrderedDict[str, AdapterSlot] = OrderedDict()
        """Idle slots by digest, the least recently used first."""
        self._pending: OrderedDict[str, PendingLoad] = OrderedDict()
        """Waiting versions by digest, the first one first."""

    def __iter__(self) -> Iterator[AdapterSlot]:
        return iter(self._slots.values())

    def waiting_names(self) -> set[str]:
        """Names of the versions that wait for a slot."""
        return {pending.version.name for pending in self._pending.values()}

    def turn_seconds(self, *, load_seconds: float, leave_seconds: float) -> float:
        """The longest turn, if a load takes `load_seconds` and rows leave and are unloaded in `leave_seconds`."""
        return 2 * self.cycle_seconds + 3 * load_seconds + leave_seconds

    def slot(self, digest: str) -> AdapterSlot | None:
        return self._slots.get(digest)

    def request(self, version: AdapterVersion, num_pages: int) -> AdapterSlot | None:
        """Count a new request; return the slot that it uses from now on, or None if it waits.

        `num_pages` must not exceed all pages.
        """
        assert 0 <= num_pages <= self.num_pages
        slot = self._slots.get(version.digest)
        if slot is not None and slot.is_open:
            self.hold(slot)
            return slot
        pending = self._pending.get(version.digest)
        if pending is None:
            pending = self._pending[version.digest] = PendingLoad(version, num_pages)
        pending.num_requests += 1
        return None

    def leave(self, digest: str) -> None:
        pending = self._pending[digest]
        pending.num_requests -= 1
        if not pending.num_requests:
            del self._pending[digest]

    def hold(self, slot: AdapterSlot, count: int = 1) -> None:
        """Count further users of a slot."""
        slot.num_users += count
        if slot.num_users:
            self._idle.pop(slot.digest, None)

    def release(self, slot: AdapterSlot, count: int = 1) -> None:
        """Forget users of a slot; the shards name it for none of them any more."""
        slot.num_users -= count
        assert slot.num_users >= 0
        if slot.is_idle:
            self._idle[slot.digest] = slot
            self._idle.move_to_end(slot.digest)

    def loaded(self, slot: AdapterSlot, now: float) -> None:
        """All ranks have loaded a slot; its waiting requests are users now."""
        assert slot.state is SlotState.LOADING
        self._num_loading -= 1
        slot.state, slot.resident_since = SlotState.RESIDENT, now
        self._open(slot)

    def failed(self, slot: AdapterSlot) -> None:
        """A load failed: the slot is to be unloaded, since some ranks may have it. Its requests no longer wait."""
        assert slot.state is SlotState.LOADING
        self._num_loading -= 1
        self._pending.pop(slot.digest, None)
        slot.state = SlotState.LEAVING

    def unloaded(self, slot: AdapterSlot) -> None:
        """No rank has the adapter in this slot any more."""
        assert slot.state is SlotState.LEAVING
        assert not slot.num_users
        del self._slots[slot.digest]
        self._free_slots.append(slot.number)
        self._free_pages += slot.num_pages

    def restarted(self) -> list[AdapterSlot]:
        """The shards may have lost their adapters; return the slots to load before any step, which have users.

        Loads under way have failed; slots that were leaving are to be unloaded again.
        """
        self._num_loading = 0
        for slot in self._slots.values():
            if slot.state is SlotState.LEAVING:
                continue
            slot.state = SlotState.STALE
            slot.closed_at, slot.is_expelled = None, False
            if slot.is_idle and slot.digest not in self._idle:
                self._idle[slot.digest] = slot
        used = [slot for slot in self._slots.values() if slot.num_users]
        for slot in used:
            if slot.state is SlotState.STALE:
                self._load(slot)
        return [slot for slot in used if slot.state is SlotState.LOADING]

    def advance(self, now: float) -> Changes:
        """Decide what changes now; called after every event, and at `next_event`."""
        changes = Changes()
        budget = SlotBudget(self._free_slots, self._free_pages, self._slots.values())
        for pending in list(self._pending.values()):
            slot = self._slots.get(pending.version.digest)
            if slot is None:
                if budget.fits(pending.num_pages) and self._num_loading < self._max_loads:
                    changes.loads.append(self._begin(pending))
                elif not self._make_room(pending.num_pages, budget, changes, now):
                    break
                budget.take(pending.num_pages)
            elif slot.state is SlotState.STALE:
                if self._num_loading < self._max_loads:
                    self._load(slot)
                    changes.loads.append(slot)
                else:
                    # No later one can be loaded either, and its slot must stay.
                    break
            elif slot.state is SlotState.LEAVING:
                budget.take(pending.num_pages)
            elif slot.state is SlotState.RESIDENT:
                if slot in budget.claimed:
                    # It waits for its next turn, and takes the room that it leaves then.
                    break
                slot.resident_since = now
                self._open(slot)
                changes.opened.append(slot)
        else:
            self._reopen(budget)
        return changes

    def next_event(self, now: float) -> float | None:
        """When `advance` should be called again though nothing happens; None if no time matters."""
        if not self._pending:
            return None
        times = (
            (slot.resident_since if slot.closed_at is None else slot.closed_at) + self.cycle_seconds
            for slot in self._slots.values()
            if slot.state is SlotState.RESIDENT and slot.num_users
        )
        return min((time for time in times if time > now), default=None)

    def expected_seconds(self, version: AdapterVersion, now: float, load_seconds: float) -> float:
        """Predict how long a request that comes now waits for its adapter, if a load takes `load_seconds`."""
        slot = self._slots.get(version.digest)
        if slot is not None and slot.is_open:
            return 0.0
        if slot is not None and slot.state is SlotState.LOADING:
            return load_seconds
        num_ahead = len(self._pending)
        num_rounds = 1 + num_ahead // self._max_loads
        num_lacking = num_ahead + 1 - len(self._free_slots) - len(self._idle)
        if num_lacking <= 0:
            return num_rounds * load_seconds
        since = sorted(each.resident_since for each in self._slots.values() if each.num_users)
        oldest = since[min(num_lacking, len(since)) - 1] if since else now
        num_turns = -(-num_lacking // self.max_adapters)
        until_closed = max(0.0, oldest + self.cycle_seconds - now)
        turns = self.turn_seconds(load_seconds=load_seconds, leave_seconds=0.0) * (num_turns - 1)
        return until_closed + self.cycle_seconds + turns + num_rounds * load_seconds

    def _begin(self, pending: PendingLoad) -> AdapterSlot:
        slot = AdapterSlot(pending.version, self._free_slots.pop(), pending.num_pages)
        self._free_pages -= pending.num_pages
        self._slots[slot.digest] = slot
        self._num_loading += 1
        return slot

    def _load(self, slot: AdapterSlot) -> None:
        slot.state = SlotState.LOADING
        self._num_loading += 1
        self._idle.pop(slot.digest, None)

    def _open(self, slot: AdapterSlot) -> None:
        """Let the waiting requests use a slot."""
        slot.closed_at, slot.is_expelled = None, False
        pending = self._pending.pop(slot.digest, None)
        self.hold(slot, 0 if pending is None else pending.num_requests)
        self.release(slot, 0)

    def _make_room(self, num_pages: int, budget: SlotBudget, changes: Changes, now: float) -> bool:
        """Let slots leave until a slot and the pages are free or will be; False if others must become older first."""
        while not budget.will_fit(num_pages):
            victim = next(iter(self._idle.values()), None)
            if victim is not None:
                del self._idle[victim.digest]
                victim.state = SlotState.LEAVING
                changes.unloads.append(victim)
                budget.claim(victim)
                continue
            closed = budget.next_to_claim(now, self.cycle_seconds)
            if closed is None:
                return False
            if closed.closed_at is None:
                closed.closed_at = now
            elif closed.closed_at + self.cycle_seconds <= now:
                closed.is_expelled = True
            budget.claim(closed)
        return True

    def _reopen(self, budget: SlotBudget) -> None:
        """Open closed slots whose room no request waits for any more."""
        for slot in self._slots.values():
            if slot.closed_at is not None and slot not in budget.claimed:
                slot.closed_at, slot.is_expelled = None, False
