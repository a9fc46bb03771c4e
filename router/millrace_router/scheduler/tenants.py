"""Waiting entries of several tenants, who share the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

from millrace_router.request.request import SchedulingParameters
from millrace_router.scheduler.deadlines import Deadlines
from millrace_router.scheduler.ranking import Item, Ranking
from millrace_router.scheduler.waiting import Waiting, WaitingQueue

E = TypeVar("E", bound=Waiting)

_MOST_ASKED = 64
"""Tenants that an estimate looks at; the others are taken to be like them."""


class _Tenant(Generic[E]):
    """What one tenant has waiting and may take."""

    __slots__ = ("deficit", "name", "place", "queue", "ring", "turn", "visits")

    def __init__(self, name: str, place: int, visits: int, queue: WaitingQueue[E]) -> None:
        self.name = name
        self.place = place
        """Where it stands in every round."""
        self.visits = visits
        """The last round for which it got its quantum."""
        self.queue = queue
        self.deficit = 0
        """Tokens it may take; below 0 what it took too much."""
        self.turn: Item = (0, 0, 0)
        self.ring: Ranking | None = None

    def cost(self) -> int:
        """Tokens its head takes: the prompt, which one that was preempted has paid for."""
        entry = self.queue.head()
        return 0 if entry is None or entry.num_preemptions else entry.num_prompt_tokens


class TenantQueue(Generic[E]):
    """Deficit round robin over tenants (Shreedhar and Varghese 1995), inside each the order of `WaitingQueue`.

    In each round a tenant gets `quantum` tokens and is served while it has any; the prompt it is served is charged, and
    by `served` what is generated, so that a deficit becomes a debt, which later rounds pay off. One that was not there
    is served at once, before those whose round it is (the new flows of RFC 8290). The rounds up to a tenant's next turn
    are computed, not walked: the turns are kept in order.

    A tenant with nothing waiting has no credit. Its debt stays, or leaving for a moment would clear it, and each round
    pays off a quantum; once paid, the tenant is forgotten. When nothing waits at all, all debts are forgiven and
    nothing is charged, for nobody is kept waiting by it.

    Nothing starves: a tenant with a debt of d is served after n = floor(d / quantum) + 1 rounds, in which each other
    tenant is admitted at most (n + 1) * quantum + m prompt tokens, m being its longest prompt, and once more so much if
    it has just come. Over any time in which two tenants always have entries waiting, and where generated tokens are
    charged before the next head, the tokens charged to them differ by at most quantum + longest prompt + longest answer
    of each. Answers that run side by side are charged late: their sum takes the place of the longest.

    Raises:
        ValueError: `quantum` is less than 1, or as for `WaitingQueue`.

    """

    def __init__(
        self, *, quantum: int, ageing_seconds: float = 10.0, max_wait_seconds: float | None = None
    ) -> None:
        if quantum < 1:
            raise ValueError(f"quantum is {quantum}; it must be at least 1 token")
        self._quantum = quantum
        self._ageing_seconds = ageing_seconds
        self._deadlines = Deadlines[E](max_wait_seconds)
        # Says at once, not at the first entry, that the seconds are wrong.
        self._new_queue()
        self._tenants: dict[str, _Tenant[E]] = {}
        self._at: dict[float, _Tenant[E]] = {}
        self._turns = Ranking()
        """(round, place) at which each tenant with entries is served next."""
        self._idle = Ranking()
        """(round, place) at which each other one is perhaps forgotten."""
        self._fresh: deque[_Tenant[E]] = deque()
        """Tenants that have just come, as long as they have tokens."""
        self._now: tuple[float, float] = (0, -1)
        """Round and place up to which everybody has been visited."""
        self._next_place = 0
        self._length = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[E]:
        """Tenant by tenant; ends badly if the queue changes meanwhile."""
        for tenant in self._tenants.values():
            yield from tenant.queue

    def append(self, entry: E) -> None:
        """Queue `entry` for its tenant.

        Raises:
            ValueError: the tenant has an entry of this id waiting already.

        """
        is_new = entry.scheduling.tenant not in self._tenants
        tenant = self._tenant(entry.scheduling.tenant)
        self._credit(tenant)
        tenant.queue.append(entry)
        if is_new:
            # Its quantum of the round that goes on, at once.
            tenant.deficit, tenant.visits = self._quantum, tenant.visits + 1
            self._fresh.append(tenant)
        self._length += 1
        self.num_prompt_tokens += entry.num_prompt_tokens
        if tenant.queue.head() is entry:
            self._arrange(tenant)

    def head(self) -> E | None:
        """The entry to admit next; stays the same until the queue changes or its tenant is charged."""
        tenant = self._visit()
        return None if tenant is None else tenant.queue.head()

    def pop(self) -> E:
        """Take the head out and charge its prompt.

        Raises:
            IndexError: nothing waits.

        """
        tenant = self._visit()
        if tenant is None:
            raise IndexError("pop from an empty queue")
        tenant.deficit -= tenant.cost()
        entry = tenant.queue.pop()
        self._removed(tenant, entry)
        return entry

    def discard(self, entry: E) -> bool:
        """Take `entry` out wherever it stands, at no charge; whether it was there."""
        tenant = self._tenants.get(entry.scheduling.tenant)
        if tenant is None or not tenant.queue.discard(entry):
            return False
        self._removed(tenant, entry)
        return True

    def ahead(self, scheduling: SchedulingParameters, now: float) -> tuple[int, int]:
        """Entries, and their prompt tokens, served before a request with `scheduling` that would be appended `now`.

        A tenant that has just come is served at once. Else an estimate: until the tenant has paid for what is ahead of
        the request in its own queue, each other tenant
        takes its quantum of every round, as long as it has entries. Exact where there is no other tenant.
        """
        tenant = self._tenants.get(scheduling.tenant)
        number, tokens = (0, 0) if tenant is None else tenant.queue.ahead(scheduling, now)
        others = [other for other in self._asked() if other is not tenant]
        if tenant is None or not others:
            return number, tokens
        rounds = max(1, -((self._credit(tenant) - tokens) // self._quantum))
        more_number, more_tokens = 0.0, 0
        for other in others:
            waiting = other.queue.num_prompt_tokens
            share = min(waiting, max(0, self._credit(other) + rounds * self._quantum))
            more_tokens += share
            more_number += len(other.queue) * share / waiting if waiting else len(other.queue)
        own = 1 if len(tenant.queue) else 0
        scale = (len(self._turns) - own) / len(others)
        return number + round(more_number * scale), tokens + round(more_tokens * scale)

    def expired(self, now: float) -> list[E]:
        """Take out the entries that have waited for too long, the most overdue first."""
        expired = self._deadlines.take_expired(now)
        for entry in expired:
            self.discard(entry)
        return expired

    def served(self, entry: E, num_tokens: int) -> None:
        """Charge `num_tokens` generated for `entry`, which was popped, to its tenant."""
        if self._length and num_tokens:
            tenant = self._tenant(entry.scheduling.tenant)
            self._credit(tenant)
            tenant.deficit -= num_tokens

    def _tenant(self, name: str) -> _Tenant[E]:
        tenant = self._tenants.get(name)
        if tenant is None:
            place, self._next_place = self._next_place, self._next_place + 1
            tenant = _Tenant(name, place, int(self._now[0]) - 1, self._new_queue())
            self._tenants[name] = self._at[place] = tenant
            self._arrange(tenant)
            self._forget()
        return tenant

    def _new_queue(self) -> WaitingQueue[E]:
        return WaitingQueue[E](ageing_seconds=self._ageing_seconds, deadlines=self._deadlines)

    def _credit(self, tenant: _Tenant[E]) -> int:
        """Give the tenant its quanta of the rounds that have visited it; its deficit."""
        current, place = self._now
        visits = int(current) - (tenant.place > place)
        tenant.deficit += self._quantum * max(0, visits - tenant.visits)
        tenant.visits = max(visits, tenant.visits)
        if not len(tenant.queue):
            tenant.deficit = min(tenant.deficit, 0)
        return tenant.deficit

    def _turn(self, tenant: _Tenant[E]) -> Item:
        """When the tenant has tokens: in the visit that goes on, or in a later one."""
        missing = 1 - self._credit(tenant)
        rounds = max(0, -(-missing // self._quantum))
        if tenant.place != self._now[1] or not len(tenant.queue):
            rounds = max(1, rounds)
        return (tenant.visits + rounds, tenant.place, 0)

    def _arrange(self, tenant: _Tenant[E]) -> None:
        """Put the tenant where its turn belongs."""
        if tenant.ring is not None:
            tenant.ring.remove(tenant.turn)
        tenant.turn = self._turn(tenant)
        tenant.ring = self._turns if len(tenant.queue) else self._idle
        tenant.ring.add(tenant.turn)

    def _removed(self, tenant: _Tenant[E], entry: E) -> None:
        """Account for an entry that was taken out of the queue of `tenant`."""
        self._length -= 1
        self.num_prompt_tokens -= entry.num_prompt_tokens
        if self._length:
            self._arrange(tenant)
            self._forget()
        else:
            self._tenants.clear()
            self._at.clear()
            self._turns, self._idle = Ranking(), Ranking()
            self._fresh.clear()

    def _forget(self) -> None:
        """Drop tenants with neither entries nor debts: up to two for every one that comes, so that no call takes long.

        Only after a visit: one that leaves and comes back must not get two quanta in a round.
        """
        for _ in range(2):
            turn = self._idle.first()
            if turn is None or turn[:2] > self._now:
                return
            tenant = self._at[turn[1]]
            if self._credit(tenant) < 0:
                self._arrange(tenant)
            else:
                self._idle.remove(turn)
                del self._tenants[tenant.name], self._at[tenant.place]

    def _asked(self) -> list[_Tenant[E]]:
        """The tenants with entries, or those whose turns are next if they are many."""
        return [self._at[place] for _, place, _ in islice(self._turns, _MOST_ASKED)]

    def _visit(self) -> _Tenant[E] | None:
        """Go on to the tenant whose turn it is. Charges only delay turns, so each is put off once per charge."""
        while self._fresh:
            if len(self._fresh[0].queue) and self._fresh[0].deficit > 0:
                return self._fresh[0]
            self._fresh.popleft()
        while (turn := self._turns.first()) is not None:
            tenant = self._at[turn[1]]
            if self._turn(tenant) == turn:
                self._now = turn[:2]
                return tenant
            self._arrange(tenant)
        return None
