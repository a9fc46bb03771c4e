"""Random histories of a residency under a virtual clock, with a bound on every wait."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random

from millrace_router.adapters.residency import MAX_LOADS, Changes, Residency
from millrace_router.adapters.slots import AdapterSlot, SlotState
from millrace_router.request.adapter import AdapterVersion
from millrace_testing.adapters.fake_adapters import version_of

SLACK = 1e-6
"""Seconds by which sums of floats may differ."""


@dataclass(eq=False)
class User:
    """A request: it waits for its adapter, or uses it."""

    version: AdapterVersion
    num_pages: int
    seconds: float
    """Work left."""
    due: float = 0.0
    """When its wait must have ended."""
    began_at: float | None = None
    is_leaving: bool = False


class History:
    """Draws arrivals, durations, failures and restarts, and checks every decision."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.num_pages = random.randint(1, 12)
        self.versions = [
            (version_of(str(number)), random.randint(0, self.num_pages))
            for number in range(random.randint(1, 12))
        ]
        if random.random() < 0.5:
            self.versions = [(version, 1) for version, _ in self.versions]
        self.max_adapters = random.randint(1, 5)
        self.load_seconds = random.choice((0.0, 0.2, 3.0))
        self.leave_seconds = random.choice((0.0, 0.1, 1.0))
        self.fails = random.choice((0.0, 0.0, 0.1))
        self.residency = Residency(
            max_adapters=self.max_adapters,
            num_pages=self.num_pages,
            cycle_seconds=random.choice((0.1, 1.0, 2.0)),
            max_loads=random.choice((1, 2, MAX_LOADS)),
        )
        self.turn = self.residency.turn_seconds(
            load_seconds=self.load_seconds, leave_seconds=2 * self.leave_seconds
        )
        self.now = 0.0
        self.waiting: list[User] = []
        self.running: dict[AdapterSlot, list[User]] = {}
        self.num_served = self.num_expelled = self.num_restarts = 0
        self.longest_wait = 0.0
        self._events: list[tuple[float, int, str, object, int]] = []
        self._numbers = count()
        self._ticks: set[float] = set()
        self._ended: set[User] = set()

    def run(self, num_arrivals: int) -> None:
        """Run until every request was served, refused, or has left."""
        at, rate = 0.0, self.random.choice((0.3, 2.0, 20.0))
        popular = self.random.random() < 0.5
        for _ in range(num_arrivals):
            at += self.random.expovariate(rate)
            index = int(len(self.versions) * self.random.random() ** (2 if popular else 1))
            version, num_pages = self.versions[index]
            seconds = self.random.choice((0.0, 0.5, 3.0, 50.0)) * self.random.random()
            self._at(at, "arrive", User(version, num_pages, seconds))
        if self.random.random() < 0.3:
            self._at(self.random.uniform(0, at), "restart", None)
        while self._events:
            self.now, _, kind, subject, life = heappop(self._events)
            if life == self.num_restarts or kind not in ("loaded", "unloaded"):
                getattr(self, f"_{kind}")(subject)
            self._check()
            self._follow(self.residency.advance(self.now))
            self._check()
        assert not self.waiting, "a request waits for ever"
        assert not any(self.running.values())

    def _at(self, time: float, kind: str, subject: object) -> None:
        heappush(self._events, (time, next(self._numbers), kind, subject, self.num_restarts))

    def _arrive(self, user: User) -> None:
        self._ask(user)
        if self.random.random() < 0.1:
            self._at(self.now + self.random.uniform(0, 10), "quit", user)

    def _ask(self, user: User) -> None:
        slot = self.residency.request(user.version, user.num_pages)
        if slot is not None:
            self._begin(slot, user)
            return
        order = list(self.residency._pending)
        user.due = self.now + (order.index(user.version.digest) + 1) * self.turn
        user.began_at = self.now
        self.waiting.append(user)

    def _begin(self, slot: AdapterSlot, user: User) -> None:
        assert slot.version == user.version
        assert slot.state is SlotState.RESIDENT
        user.began_at = self.now
        self.running.setdefault(slot, []).append(user)
        self._at(self.now + user.seconds, "finish", (slot, user))

    def _quit(self, user: User) -> None:
        if user in self.waiting:
            self.waiting.remove(user)
            self.residency.leave(user.version.digest)

    def _finish(self, subject: tuple[AdapterSlot, User]) -> None:
        slot, user = subject
        # A user that was expelled meanwhile, or has begun anew, ends by another event.
        is_due = user.began_at is not None and user.began_at + user.seconds <= self.now + SLACK
        if user in self.running.get(slot, ()) and not user.is_leaving and is_due:
            self.running[slot].remove(user)
            self.num_served += 1
            self.residency.release(slot)

    def _left(self, subject: tuple[AdapterSlot, User]) -> None:
        """Let the rows of an expelled user leave the batch."""
        slot, user = subject
        if not user.is_leaving or user not in self.running.get(slot, ()):
            return
        self.running[slot].remove(user)
        user.is_leaving = False
        user.seconds = max(0.0, user.seconds - (self.now - (user.began_at or 0.0)))
        self.num_expelled += 1
        self.residency.release(slot)
        self._ask(user)

    def _loaded(self, slot: AdapterSlot) -> None:
        if self.random.random() < self.fails:
            self._failed(slot)
            return
        self.residency.loaded(slot, self.now)
        self._admit(slot)

    def _admit(self, slot: AdapterSlot) -> None:
        for user in [user for user in self.waiting if user.version == slot.version]:
            self.waiting.remove(user)
            assert user.began_at is not None
            self.longest_wait = max(self.longest_wait, self.now - user.began_at)
            self._begin(slot, user)

    def _failed(self, slot: AdapterSlot) -> None:
        self.residency.failed(slot)
        self.waiting = [user for user in self.waiting if user.version != slot.version]
        users = self.running.pop(slot, [])
        self.residency.release(slot, len(users))
        self._unload(slot)

    def _unloaded(self, slot: AdapterSlot) -> None:
        assert not self.running.get(slot), "a slot is freed under its users"
        self.residency.unloaded(slot)

    def _restart(self, _: None) -> None:
        """The shards lose everything. Running requests are computed again; the first loads precede all steps."""
        self.num_restarts += 1
        for slot, users in self.running.items():
            for user in users:
                if user.is_leaving:
                    # Its end may have come while it was leaving.
                    user.is_leaving = False
                    ends_at = (user.began_at or 0.0) + user.seconds
                    self._at(max(self.now, ends_at), "finish", (slot, user))
        for slot in self.residency.restarted():
            assert self.running[slot]
            self._load(slot)
        for slot in self.residency:
            if slot.state is SlotState.LEAVING:
                self._unload(slot)
        order = list(self.residency._pending)
        for user in self.waiting:
            number = order.index(user.version.digest) + 1
            user.due = self.now + self.load_seconds + number * self.turn

    def _tick(self, _: None) -> None:
        """Do nothing: time has passed, and `advance` follows."""

    def _follow(self, changes: Changes) -> None:
        for slot in changes.loads:
            self._load(slot)
        for slot in changes.unloads:
            assert not self.running.get(slot), "a slot with users is evicted"
            self._unload(slot)
        for slot in changes.opened:
            self._admit(slot)
        for slot in self.residency:
            if not slot.is_expelled:
                continue
            for user in self.running[slot]:
                if not user.is_leaving:
                    user.is_leaving = True
                    delay = self.random.uniform(0, self.leave_seconds)
                    self._at(self.now + delay, "left", (slot, user))
        time = self.residency.next_event(self.now)
        if time is not None and time not in self._ticks:
            self._ticks.add(time)
            self._at(time, "tick", None)

    def _load(self, slot: AdapterSlot) -> None:
        self._at(self.now + self.random.uniform(0, self.load_seconds), "loaded", slot)

    def _unload(self, slot: AdapterSlot) -> None:
        self._at(self.now + self.random.uniform(0, self.leave_seconds), "unloaded", slot)

    def _check(self) -> None:
        residency = self.residency
        slots = list(residency)
        numbers = [slot.number for slot in slots] + residency._free_slots
        assert sorted(numbers) == list(range(1, self.max_adapters + 1)), "a slot is lost or doubled"
        used = sum(slot.num_pages for slot in slots)
        assert used + residency._free_pages == self.num_pages, "pages are lost or doubled"
        assert residency._free_pages >= 0, "more pages than there are"
        for slot in slots:
            assert slot.num_users == len(self.running.get(slot, ())), "a user is lost or doubled"
        idle = {slot for slot in slots if slot.is_idle}
        assert idle == set(residency._idle.values()), (
            "an idle slot cannot be evicted, or a busy one can"
        )
        waiting = {user.version.digest for user in self.waiting}
        assert waiting == set(residency._pending), "a pending load is lost or left over"
        for user in self.waiting:
            assert self.now <= user.due + SLACK, f"a wait exceeds its bound at {self.now}"
