"""The waiting requests of several tenants, which share the tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from typing_extensions import override

from millrace_router.request.request import SchedulingParameters
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.queue import Deadlines, RequestQueue, WaitingQueue

_MOST_COUNTED = 64
"""Tenants that an estimate reads; it takes the others to be like them."""

_Turn = tuple[int, int]
"""Round, and the tenant's position in it."""


class _Tenant:
    """The waiting requests of one tenant, and the tokens that it may take."""

    __slots__ = ("deficit", "name", "position", "queue", "ring", "turn", "visits")

    def __init__(self, name: str, position: int, visits: int, queue: WaitingQueue) -> None:
        self.name = name
        self.position = position
        """Its position in every round."""
        self.visits = visits
        """The last round for which it got its quantum."""
        self.queue = queue
        self.deficit = 0
        """Tokens that it may take; a debt if below 0."""
        self.turn: _Turn = (0, 0)
        self.ring: list[_Turn] | None = None
        """The sorted list that contains its turn."""


class TenantQueue(RequestQueue):
    """Deficit round robin over tenants (Shreedhar and Varghese 1995); each tenant's requests are a `WaitingQueue`.

    In each round a tenant gets `quantum` tokens and is served while it has tokens left. A prompt is charged at
    admission, and the generated tokens by `served`, so that a deficit becomes a debt, which later rounds pay off. A
    new tenant is served at once, before the tenants of the current round (the new flows of RFC 8290). The rounds up to
    a tenant's next turn are computed, not iterated: the turns are kept in order.

    A tenant without waiting requests keeps no credit. Its debt stays, because leaving for a moment would clear it
    otherwise, and each round pays off a quantum; after that the tenant is forgotten. When no request waits, all debts
    are cleared and nothing is charged.

    No request starves: a tenant with a debt of d is served after n = floor(d / quantum) + 1 rounds, in which each
    other tenant is admitted at most (n + 1) * quantum + m prompt tokens, where m is its longest prompt, and once more
    as much if it is new. Over any time in which two tenants always have waiting requests, and where generated tokens
    are charged before the next head, the tokens charged to them differ by at most quantum + longest prompt + longest
    answer of each. Answers of concurrent requests are charged late: their sum takes the place of the longest.

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
        self._deadlines = Deadlines(max_wait_seconds)
        self._new_queue()  # Raises for wrong seconds.
        self._tenants: dict[str, _Tenant] = {}
        self._at: dict[int, _Tenant] = {}
        """Tenants by position."""
        self._turns: list[_Turn] = []
        """The next turn of each tenant with waiting requests, in order."""
        self._idle: list[_Turn] = []
        """The next turn of each other tenant, at which it may be forgotten, in order."""
        self._fresh: deque[_Tenant] = deque()
        """New tenants that have tokens left."""
        self._now: _Turn = (0, -1)
        """The current turn."""
        self._next_position = 0
        self._length = 0
        self.num_prompt_tokens = 0
        """Prompt tokens of all waiting requests."""

    @override
    def __len__(self) -> int:
        return self._length

    @override
    def __iter__(self) -> Iterator[SchedulableRequest]:
        """Tenant by tenant; the queue must not change meanwhile."""
        for tenant in self._tenants.values():
            yield from tenant.queue

    @override
    def append(self, request: SchedulableRequest) -> None:
        """Queue `request` for its tenant.

        Raises:
            ValueError: a request of this id waits already for the tenant.

        """
        is_new = request.scheduling.tenant not in self._tenants
        tenant = self._tenant(request.scheduling.tenant)
        self._credit(tenant)
        tenant.queue.append(request)
        if is_new:
            # It gets its quantum of the current round at once.
            tenant.deficit, tenant.visits = self._quantum, tenant.visits + 1
            self._fresh.append(tenant)
        self._length += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        if tenant.queue.head() is request:
            self._arrange(tenant)

    @override
    def head(self) -> SchedulableRequest | None:
        tenant = self._visit()
        return None if tenant is None else tenant.queue.head()

    @override
    def pop(self) -> SchedulableRequest:
        """Take the head out and charge its prompt.

        Raises:
            IndexError: nothing waits.

        """
        tenant = self._visit()
        if tenant is None:
            raise IndexError("pop from an empty queue")
        request = tenant.queue.pop()
        tenant.deficit -= _cost(request)
        self._removed(tenant, request)
        return request

    @override
    def shortest(self) -> SchedulableRequest | None:
        """Return the shortest of the prompts that each of the next tenants would have computed out of turn."""
        requests = [
            request for tenant in self._next_tenants() if (request := tenant.queue.shortest())
        ]
        return min(requests, key=lambda request: request.num_prompt_tokens, default=None)

    @override
    def take(self, request: SchedulableRequest) -> None:
        """Take out `request`, which waits, ahead of its turn, and charge its prompt."""
        tenant = self._tenants[request.scheduling.tenant]
        self._credit(tenant)
        tenant.queue.take(request)
        tenant.deficit -= _cost(request)
        self._removed(tenant, request)

    @override
    def discard(self, request: SchedulableRequest) -> bool:
        tenant = self._tenants.get(request.scheduling.tenant)
        if tenant is None or not tenant.queue.discard(request):
            return False
        self._removed(tenant, request)
        return True

    @override
    def ahead(self, scheduling: SchedulingParameters, now: float) -> tuple[int, int]:
        """Number and prompt tokens of the requests that are served before one with `scheduling` that comes `now`.

        There are none for a new tenant. Otherwise an estimate: until the tenant has paid for the requests before this
        one in its own queue, each other tenant takes its quantum of every round, as long as it has requests. The
        result is exact if there is no other tenant.
        """
        tenant = self._tenants.get(scheduling.tenant)
        number, tokens = (0, 0) if tenant is None else tenant.queue.ahead(scheduling, now)
        others = [other for other in self._next_tenants() if other is not tenant]
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

    @override
    def served(self, request: SchedulableRequest, num_tokens: int) -> None:
        if self._length and num_tokens:
            tenant = self._tenant(request.scheduling.tenant)
            self._credit(tenant)
            tenant.deficit -= num_tokens

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            position, self._next_position = self._next_position, self._next_position + 1
            tenant = _Tenant(name, position, self._now[0] - 1, self._new_queue())
            self._tenants[name] = self._at[position] = tenant
            self._arrange(tenant)
            self._forget()
        return tenant

    def _new_queue(self) -> WaitingQueue:
        return WaitingQueue(ageing_seconds=self._ageing_seconds, deadlines=self._deadlines)

    def _credit(self, tenant: _Tenant) -> int:
        """Give the tenant its quanta of the past rounds; return its deficit."""
        current, position = self._now
        visits = current - (tenant.position > position)
        tenant.deficit += self._quantum * max(0, visits - tenant.visits)
        tenant.visits = max(visits, tenant.visits)
        if not len(tenant.queue):
            tenant.deficit = min(tenant.deficit, 0)
        return tenant.deficit

    def _turn(self, tenant: _Tenant) -> _Turn:
        """Return the turn at which the tenant has tokens: the current one, or a later one."""
        missing = 1 - self._credit(tenant)
        rounds = max(0, -(-missing // self._quantum))
        if tenant.position != self._now[1] or not len(tenant.queue):
            rounds = max(1, rounds)
        return tenant.visits + rounds, tenant.position

    def _arrange(self, tenant: _Tenant) -> None:
        """Put the tenant where its turn belongs."""
        if tenant.ring is not None:
            del tenant.ring[bisect_left(tenant.ring, tenant.turn)]
        tenant.turn = self._turn(tenant)
        tenant.ring = self._turns if len(tenant.queue) else self._idle
        insort(tenant.ring, tenant.turn)

    def _removed(self, tenant: _Tenant, request: SchedulableRequest) -> None:
        """Account for a request that was taken out of the queue of `tenant`."""
        self._length -= 1
        self.num_prompt_tokens -= request.num_prompt_tokens
        if self._length:
            self._arrange(tenant)
            self._forget()
        else:
            self._tenants.clear()
            self._at.clear()
            self._turns, self._idle = [], []
            self._fresh.clear()

    def _forget(self) -> None:
        """Drop up to two tenants with neither requests nor debts; a constant number, so that no call takes long.

        A tenant is dropped after its turn only: one that leaves and returns must not get two quanta in a round.
        """
        for _ in range(2):
            if not self._idle or self._idle[0] > self._now:
                return
            tenant = self._at[self._idle[0][1]]
            if self._credit(tenant) < 0:
                self._arrange(tenant)
            else:
                del self._idle[0], self._tenants[tenant.name], self._at[tenant.position]

    def _next_tenants(self) -> list[_Tenant]:
        """Return the tenants with requests; of many tenants, those whose turns are next."""
        return [self._at[position] for _, position in self._turns[:_MOST_COUNTED]]

    def _visit(self) -> _Tenant | None:
        """Advance to the tenant whose turn is next.

        A charge only delays a turn, so each tenant is moved back at most once per charge.
        """
        while self._fresh:
            if len(self._fresh[0].queue) and self._fresh[0].deficit > 0:
                return self._fresh[0]
            self._fresh.popleft()
        while self._turns:
            turn = self._turns[0]
            tenant = self._at[turn[1]]
            if self._turn(tenant) == turn:
                self._now = turn
                return tenant
            self._arrange(tenant)
        return None


def _cost(request: SchedulableRequest) -> int:
    """Return tokens to charge at admission: the prompt, but none for a preempted request, which has paid."""
    return 0 if request.num_preemptions else request.num_prompt_tokens
