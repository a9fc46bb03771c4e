"""Slots and pages that waiting adapters may take: those that are free, and those that will be."""

from __future__ import annotations

from collections.abc import Collection, Sized

from millrace_router.adapters.place import Place, PlaceState


class Room:
    """Counts the slots and pages that are left in one pass over the waiting adapters. It changes no place."""

    def __init__(self, free_slots: Sized, free_pages: int, places: Collection[Place]) -> None:
        self.claimed: set[Place] = set()
        """Used places whose room a waiting adapter will take."""
        self._slots = len(free_slots)
        self._pages = free_pages
        leaving = [place for place in places if place.state is PlaceState.LEAVING]
        self._coming_slots = len(leaving)
        self._coming_pages = sum(place.num_pages for place in leaving)
        self._places = places
        self._candidates: list[Place] | None = None

    def fits(self, num_pages: int) -> bool:
        """Whether so many pages and a slot are free."""
        return self._slots > 0 and self._pages >= num_pages

    def will_fit(self, num_pages: int) -> bool:
        """Whether so many pages and a slot are free, or will be."""
        pages = self._pages + self._coming_pages
        return self._slots + self._coming_slots > 0 and pages >= num_pages

    def take(self, num_pages: int) -> None:
        """Keep a slot and so many pages for an adapter: free ones first."""
        slots, pages = min(1, self._slots), min(num_pages, self._pages)
        self._slots -= slots
        self._coming_slots -= 1 - slots
        self._pages -= pages
        self._coming_pages -= num_pages - pages

    def claim(self, place: Place) -> None:
        """Count the room of a place that leaves."""
        self._coming_slots += 1
        self._coming_pages += place.num_pages
        self.claimed.add(place)

    def next_to_claim(self, now: float, cycle_seconds: float) -> Place | None:
        """The next place to close: a closed one, or the one resident longest, if for `cycle_seconds` at least."""
        if self._candidates is None:
            used = [place for place in self._places if place.state is PlaceState.RESIDENT]
            # The last one is taken first.
            self._candidates = sorted(
                used,
                key=lambda place: (place.closed_at is not None, -place.resident_since),
            )
        while self._candidates:
            place = self._candidates.pop()
            if place.state is not PlaceState.RESIDENT:
                continue
            if place.closed_at is None and place.resident_since + cycle_seconds > now:
                return None
            return place
        return None
