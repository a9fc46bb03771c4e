"""Which adapters the shards hold: slots, pages, evictions and turns. Pure decisions; no I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace_router.adapters.place import Demand, Place, PlaceState
from millrace_router.adapters.room import Room
from millrace_router.request.adapter import AdapterVersion

MAX_LOADS = 4
"""Most loads at a time: each takes a worker of every shard, which answers health checks too."""
LEAST_CYCLE_SECONDS = 0.1
"""A shorter cycle would spend its time on loads."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The consequences of an event."""

    loads: list[Place] = field(default_factory=list)
    """Places to load now; `loaded` or `failed` reports the end."""
    unloads: list[Place] = field(default_factory=list)
    """Places to free now; `unloaded` reports the end."""
    opened: list[Place] = field(default_factory=list)
    """Closed places that are open again; their waiting requests are users now."""


class Residency:
    """The places of adapters on the shards, and the versions that wait for one in the order of their first requests.

    A version with users is pinned. Room comes from idle places first, the least recently used ones before others. If
    that is not enough, the places that have been resident longest, and for a cycle at least, are closed: new requests
    wait. A place that is still used a cycle later is expelled: its requests leave the batch, and wait again. No version
    overtakes one that waits for room.

    So each wait is bounded. In a *turn*, the first waiting version gets a place: the loads under way end, the youngest
    place becomes a cycle old, a cycle later it is expelled, its rows leave, it is unloaded, and the version is loaded
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
        """Slots are 1 … `max_adapters`; `num_pages` is that of the rank with the fewest."""
        self.num_pages = num_pages
        self.max_adapters = max_adapters
        self.cycle_seconds = max(cycle_seconds, LEAST_CYCLE_SECONDS)
        self._max_loads = max_loads
        self._num_loading = 0
        self._free_slots = list(range(max_adapters, 0, -1))
        self._free_pages = num_pages
        self._places: dict[str, Place] = {}
        self._idle: OrderedDict[str, Place] = OrderedDict()
        """Idle places by digest, the least recently used first."""
        self._demands: OrderedDict[str, Demand] = OrderedDict()
        """Waiting versions by digest, the first one first."""

    def __iter__(self) -> Iterator[Place]:
        """All places."""
        return iter(self._places.values())

    def waiting_names(self) -> set[str]:
        """Names of the versions that wait for a place."""
        return {demand.version.name for demand in self._demands.values()}

    def turn_seconds(self, *, load_seconds: float, leave_seconds: float) -> float:
        """The longest turn, if a load takes `load_seconds` and rows leave and are unloaded in `leave_seconds`."""
        return 2 * self.cycle_seconds + 3 * load_seconds + leave_seconds

    def place(self, digest: str) -> Place | None:
        """The place of a version."""
        return self._places.get(digest)

    def request(self, version: AdapterVersion, num_pages: int, now: float) -> Place | None:
        """Count a new request; return the place that it uses from now on, or None if it waits.

        `num_pages` must not exceed all pages.
        """
        assert 0 <= num_pages <= self.num_pages
        place = self._places.get(version.digest)
        if place is not None and place.is_open:
            self.hold(place)
            return place
        demand = self._demands.get(version.digest)
        if demand is None:
            demand = self._demands[version.digest] = Demand(version, num_pages, now)
        demand.num_requests += 1
        return None

    def leave(self, digest: str) -> None:
        """Forget a waiting request."""
        demand = self._demands[digest]
        demand.num_requests -= 1
        if not demand.num_requests:
            del self._demands[digest]

    def hold(self, place: Place, count: int = 1) -> None:
        """Count further users of a place."""
        place.num_users += count
        if place.num_users:
            self._idle.pop(place.digest, None)

    def release(self, place: Place, count: int = 1) -> None:
        """Forget users of a place; the shards name it for none of them any more."""
        place.num_users -= count
        assert place.num_users >= 0
        if place.is_idle:
            self._idle[place.digest] = place
            self._idle.move_to_end(place.digest)

    def loaded(self, place: Place, now: float) -> None:
        """All ranks have loaded a place; its waiting requests are users now."""
        assert place.state is PlaceState.LOADING
        self._num_loading -= 1
        place.state, place.resident_since = PlaceState.RESIDENT, now
        self._open(place)

    def failed(self, place: Place) -> None:
        """A load failed: the place is to be unloaded, since some ranks may have it. Its requests no longer wait."""
        assert place.state is PlaceState.LOADING
        self._num_loading -= 1
        self._demands.pop(place.digest, None)
        place.state = PlaceState.LEAVING

    def unloaded(self, place: Place) -> None:
        """No rank has the adapter in this place any more."""
        assert place.state is PlaceState.LEAVING
        assert not place.num_users
        del self._places[place.digest]
        self._free_slots.append(place.slot)
        self._free_pages += place.num_pages

    def restarted(self) -> list[Place]:
        """The shards may have lost their adapters; return the places to load before any step, which have users.

        Loads under way have failed; places that were leaving are to be unloaded again.
        """
        self._num_loading = 0
        for place in self._places.values():
            if place.state is PlaceState.LEAVING:
                continue
            place.state = PlaceState.STALE
            place.closed_at, place.is_expelled = None, False
            if place.is_idle and place.digest not in self._idle:
                self._idle[place.digest] = place
        used = [place for place in self._places.values() if place.num_users]
        for place in used:
            if place.state is PlaceState.STALE:
                self._load(place)
        return [place for place in used if place.state is PlaceState.LOADING]

    def advance(self, now: float) -> Changes:
        """Decide what changes now; called after every event, and at `next_event`."""
        changes = Changes()
        room = Room(self._free_slots, self._free_pages, self._places.values())
        for demand in list(self._demands.values()):
            place = self._places.get(demand.version.digest)
            if place is None:
                if room.fits(demand.num_pages) and self._num_loading < self._max_loads:
                    changes.loads.append(self._begin(demand))
                elif not self._make_room(demand.num_pages, room, changes, now):
                    break
                room.take(demand.num_pages)
            elif place.state is PlaceState.STALE:
                if self._num_loading < self._max_loads:
                    self._load(place)
                    changes.loads.append(place)
                else:
                    # No later one can be loaded either, and its place must stay.
                    break
            elif place.state is PlaceState.LEAVING:
                room.take(demand.num_pages)
            elif place.state is PlaceState.RESIDENT:
                if place in room.claimed:
                    # It waits for its next turn, and takes the room that it leaves then.
                    break
                place.resident_since = now
                self._open(place)
                changes.opened.append(place)
        else:
            self._reopen(room)
        return changes

    def next_event(self, now: float) -> float | None:
        """When `advance` should be called again though nothing happens; None if no time matters."""
        if not self._demands:
            return None
        times = (
            (place.resident_since if place.closed_at is None else place.closed_at)
            + self.cycle_seconds
            for place in self._places.values()
            if place.state is PlaceState.RESIDENT and place.num_users
        )
        return min((time for time in times if time > now), default=None)

    def expected_seconds(self, version: AdapterVersion, now: float, load_seconds: float) -> float:
        """Predict how long a request that comes now waits for its adapter, if a load takes `load_seconds`."""
        place = self._places.get(version.digest)
        if place is not None and place.is_open:
            return 0.0
        if place is not None and place.state is PlaceState.LOADING:
            return load_seconds
        num_ahead = len(self._demands)
        num_rounds = 1 + num_ahead // self._max_loads
        num_lacking = num_ahead + 1 - len(self._free_slots) - len(self._idle)
        if num_lacking <= 0:
            return num_rounds * load_seconds
        since = sorted(each.resident_since for each in self._places.values() if each.num_users)
        oldest = since[min(num_lacking, len(since)) - 1] if since else now
        num_turns = -(-num_lacking // self.max_adapters)
        until_closed = max(0.0, oldest + self.cycle_seconds - now)
        turns = self.turn_seconds(load_seconds=load_seconds, leave_seconds=0.0) * (num_turns - 1)
        return until_closed + self.cycle_seconds + turns + num_rounds * load_seconds

    def _begin(self, demand: Demand) -> Place:
        place = Place(demand.version, self._free_slots.pop(), demand.num_pages)
        self._free_pages -= demand.num_pages
        self._places[place.digest] = place
        self._num_loading += 1
        return place

    def _load(self, place: Place) -> None:
        place.state = PlaceState.LOADING
        self._num_loading += 1
        self._idle.pop(place.digest, None)

    def _open(self, place: Place) -> None:
        """Let the waiting requests use a place."""
        place.closed_at, place.is_expelled = None, False
        demand = self._demands.pop(place.digest, None)
        self.hold(place, 0 if demand is None else demand.num_requests)
        self.release(place, 0)

    def _make_room(self, num_pages: int, room: Room, changes: Changes, now: float) -> bool:
        """Let places leave until a slot and the pages are free or will be; False if others must become older first."""
        while not room.will_fit(num_pages):
            victim = next(iter(self._idle.values()), None)
            if victim is not None:
                del self._idle[victim.digest]
                victim.state = PlaceState.LEAVING
                changes.unloads.append(victim)
                room.claim(victim)
                continue
            closed = room.next_to_claim(now, self.cycle_seconds)
            if closed is None:
                return False
            if closed.closed_at is None:
                closed.closed_at = now
            elif closed.closed_at + self.cycle_seconds <= now:
                closed.is_expelled = True
            room.claim(closed)
        return True

    def _reopen(self, room: Room) -> None:
        """Open closed places whose room nobody waits for any more."""
        for place in self._places.values():
            if place.closed_at is not None and place not in room.claimed:
                place.closed_at, place.is_expelled = None, False
