"""Slots and pages for adapters in the shards' memory."""

from __future__ import annotations

from collections.abc import Collection, Sized
from dataclasses import dataclass, field
from enum import Enum, auto

from millrace_router.request.adapter import AdapterVersion


class SlotState(Enum):
    """The state of a slot on the shards."""

    LOADING = auto()
    """They are loading the adapter."""
    RESIDENT = auto()
    """All ranks have loaded it."""
    STALE = auto()
    """They had it before the last failure; whether they still do is unknown."""
    LEAVING = auto()
    """They are removing it."""


@dataclass(slots=True, eq=False)
class AdapterSlot:
    """A slot and its pages, with the version that they are for. Times are in seconds."""

    version: AdapterVersion
    number: int
    """The slot's number on the shards, from 1."""
    num_pages: int
    state: SlotState = SlotState.LOADING
    num_users: int = 0
    """Requests that are queued or admitted with it, and sequences of the shards that name it."""
    resident_since: float = 0.0
    closed_at: float | None = None
    """When it was closed to new requests; None while it is open."""
    is_expelled: bool = False
    """Whether its requests are taken out of the batch, so that it becomes idle."""
    num_slices: int = field(init=False)
    """Slices of 16 ranks of all its layers."""

    def __post_init__(self) -> None:
        self.num_slices = sum(count for _, count in self.version.num_slices)

    @property
    def digest(self) -> str:
        return self.version.digest

    @property
    def is_open(self) -> bool:
        """Whether a new request may use it at once."""
        return self.state is SlotState.RESIDENT and self.closed_at is None

    @property
    def is_idle(self) -> bool:
        """Whether it may be evicted."""
        return not self.num_users and self.state in (SlotState.RESIDENT, SlotState.STALE)


@dataclass(slots=True, eq=False)
class PendingLoad:
    """A version that has no open slot, and the requests that wait for one."""

    version: AdapterVersion
    num_pages: int
    num_requests: int = 0


class SlotBudget:
    """Counts the slots and pages left in one pass over the waiting adapters. It changes no slot."""

    def __init__(self, free_slots: Sized, free_pages: int, slots: Collection[AdapterSlot]) -> None:
        self.claimed: set[AdapterSlot] = set()
        """Used slots whose room a waiting adapter will take."""
        self._num_slots = len(free_slots)
        self._num_pages = free_pages
        leaving = [slot for slot in slots if slot.state is SlotState.LEAVING]
        self._num_coming_slots = len(leaving)
        self._num_coming_pages = sum(slot.num_pages for slot in leaving)
        self._slots = slots
        self._candidates: list[AdapterSlot] | None = None

    def fits(self, num_pages: int) -> bool:
        """Return whether this many pages and a slot are free."""
        return self._num_slots > 0 and self._num_pages >= num_pages

    def will_fit(self, num_pages: int) -> bool:
        """Return whether this many pages and a slot are free, or will be."""
        pages = self._num_pages + self._num_coming_pages
        return self._num_slots + self._num_coming_slots > 0 and pages >= num_pages

    def take(self, num_pages: int) -> None:
        """Keep a slot and this many pages for an adapter: free ones first."""
        slots, pages = min(1, self._num_slots), min(num_pages, self._num_pages)
        self._num_slots -= slots
        self._num_coming_slots -= 1 - slots
        self._num_pages -= pages
        self._num_coming_pages -= num_pages - pages

    def claim(self, slot: AdapterSlot) -> None:
        """Count the room of a slot that leaves."""
        self._num_coming_slots += 1
        self._num_coming_pages += slot.num_pages
        self.claimed.add(slot)

    def next_to_claim(self, now: float, cycle_seconds: float) -> AdapterSlot | None:
        """Return the next slot to close: a closed one, or the one resident longest, if for `cycle_seconds` at least."""
        if self._candidates is None:
            used = [slot for slot in self._slots if slot.state is SlotState.RESIDENT]
            # The last one is taken first.
            self._candidates = sorted(
                used,
                key=lambda slot: (slot.closed_at is not None, -slot.resident_since),
            )
        while self._candidates:
            slot = self._candidates.pop()
            if slot.state is not SlotState.RESIDENT:
                continue
            if slot.closed_at is None and slot.resident_since + cycle_seconds > now:
                return None
            return slot
        return None
