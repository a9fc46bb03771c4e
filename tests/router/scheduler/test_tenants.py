"""TenantQueue: the share of each tenant, and bounds of the wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace_router.request.request import SchedulingParameters
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.queue import WaitingQueue
from millrace_router.scheduler.tenants import TenantQueue


@dataclass(eq=False, kw_only=True)
class Item(SchedulableRequest):
    generated: int = 0


def new(
    request_id: int,
    scheduling: SchedulingParameters,
    tokens: int,
    queued_at: float,
    generated: int = 0,
) -> Item:
    return Item(
        request_id=request_id,
        scheduling=scheduling,
        num_prompt_tokens=tokens,
        queued_at=queued_at,
        generated=generated,
    )


def of(tenant: str, request_id: int, tokens: int = 1, generated: int = 0) -> Item:
    return new(
        request_id, SchedulingParameters(tenant=tenant), tokens, float(request_id), generated
    )


def test_rounds_give_each_tenant_its_quantum() -> None:
    queue = TenantQueue(quantum=10)
    for i in range(6):
        queue.append(of("a", i, 5))
    for i in range(6, 9):
        queue.append(of("b", i, 10))
    assert [queue.pop().scheduling.tenant for _ in range(9)] == list("aabaabaab")


def test_a_debt_is_paid_off_by_rounds() -> None:
    queue = TenantQueue(quantum=10)
    for i in range(10):
        queue.append(of("ab"[i % 2], i, 10))
    first = queue.pop()
    queue.served(first, 20)
    assert [queue.pop().scheduling.tenant for _ in range(5)] == list("bbbab")


def test_leaving_for_a_moment_neither_clears_a_debt_nor_gives_a_second_quantum() -> None:
    queue = TenantQueue(quantum=10)
    for i in range(4):
        queue.append(of("b", i, 10))
    queue.append(of("a", 4, 10))
    assert queue.pop().scheduling.tenant == "b"
    first = queue.pop()
    assert first.scheduling.tenant == "a"
    queue.append(of("a", 5, 10))
    assert queue.pop().scheduling.tenant == "b"
    assert queue.pop().scheduling.tenant == "a"
    queue.served(first, 10)
    queue.append(of("a", 6, 10))
    assert [queue.pop().scheduling.tenant for _ in range(3)] == list("bba")


def test_an_idle_tenant_keeps_no_credit() -> None:
    queue = TenantQueue(quantum=10)
    for item in (of("a", 0, 1), of("b", 1, 10), of("b", 2, 10)):
        queue.append(item)
    assert queue.pop().scheduling.tenant == "a"
    queue.append(of("a", 3, 5))
    assert [queue.pop().scheduling.tenant for _ in range(3)] == list("bab")


def test_an_idle_tenant_keeps_its_debt_until_rounds_have_paid_it() -> None:
    queue = TenantQueue(quantum=10)
    queue.append(of("a", 0, 10))
    for i in range(1, 20):
        queue.append(of("b", i, 10))
    queue.served(queue.pop(), 50)
    assert [queue.pop().scheduling.tenant for _ in range(3)] == list("bbb")
    queue.append(of("a", 20, 10))
    assert [queue.pop().scheduling.tenant for _ in range(5)] == list("bbbab")


def test_a_small_tenant_waits_for_few_requests_of_one_that_sends_fifty_times_more() -> None:
    queue = TenantQueue(quantum=100)
    for i in range(500):
        queue.append(of("big", i, 50))
    for number in range(10):
        small = of("small", 1000 + number, 50)
        queue.append(small)
        others = 0
        while queue.pop() is not small:
            others += 1
        assert others <= 4
        for i in range(50):
            queue.append(of("big", 2000 + 50 * number + i, 50))


def test_everything_expires_and_every_tenant_is_forgotten() -> None:
    queue = TenantQueue(quantum=10, max_wait_seconds=5.0)
    items = [of(str(i), i) for i in range(100)]
    for item in items:
        queue.append(item)
    assert queue.expired(50.0) == items[:45]
    assert queue.expired(200.0) == items[45:]
    assert (len(queue), queue.num_prompt_tokens, queue.head()) == (0, 0, None)
    assert not queue._tenants


def test_a_prompt_taken_out_of_turn_is_charged_to_its_tenant() -> None:
    queue = TenantQueue(quantum=10)
    for request in (of("a", 0, 90), of("a", 1, 90), of("b", 2, 40), of("b", 3, 7), of("b", 4, 50)):
        queue.append(request)
    shortest = queue.shortest()
    assert shortest is not None
    assert shortest.request_id == 3
    queue.take(shortest)
    assert queue._tenants["b"].deficit == 10 - 7
    assert (len(queue), queue.num_prompt_tokens) == (4, 270)
    taken = queue.shortest()
    assert taken is not None
    queue.take(taken)
    assert queue._tenants["b"].deficit == 10 - 7 - 40
    assert [queue.pop().request_id for _ in range(3)] == [0, 4, 1] or len(queue) == 0


def test_tenants_that_are_gone_take_no_memory() -> None:
    queue = TenantQueue(quantum=10)
    for i in range(50):
        queue.append(of("steady", i, 10))
    for i in range(50, 3000):
        queue.append(of(f"once {i}", i, 10))
        queue.append(of("steady", 10_000 + i, 10))
        queue.served(queue.pop(), 15)
        queue.pop()
    backlog = {item.scheduling.tenant for item in queue}
    assert len(queue._tenants) <= len(backlog) + 20
    assert set(queue._at.values()) == set(queue._tenants.values())
    assert len(queue._turns) + len(queue._idle) == len(queue._tenants)


def test_new_tenants_are_served_at_once_and_pay_afterwards() -> None:
    queue = TenantQueue(quantum=10)
    for i in range(50):
        queue.append(of("steady", i, 10))
    for _ in range(3):
        assert queue.pop().scheduling.tenant == "steady"
    large, next_one = of("new", 100, 35), of("new", 101, 35)
    queue.append(large)
    queue.append(next_one)
    assert queue.pop() is large
    # 25 tokens of debt are three rounds, in which the other takes 10 each.
    others = [queue.pop() for _ in range(3)]
    assert next_one not in others
    assert queue.head() is next_one


def test_leaving_and_coming_back_is_not_having_just_come() -> None:
    queue = TenantQueue(quantum=10)
    for i in range(50):
        queue.append(of("steady", i, 10))
    queue.append(of("new", 100, 35))
    assert queue.pop().scheduling.tenant == "steady"
    first = queue.pop()
    queue.append(of("new", 101, 35))
    assert (first.scheduling.tenant, queue.pop().scheduling.tenant) == ("new", "steady")


def test_an_estimate_knows_the_rounds() -> None:
    queue = TenantQueue(quantum=10)
    for i in range(100):
        queue.append(of("big", i, 10))
    assert queue.ahead(SchedulingParameters(tenant="small"), 100.0) == (0, 0)
    assert queue.ahead(SchedulingParameters(tenant="big"), 100.0) == (100, 1000)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="quantum"):
        TenantQueue(quantum=0)
    with pytest.raises(ValueError, match="ageing_seconds"):
        TenantQueue(quantum=1, ageing_seconds=-1.0)
    with pytest.raises(IndexError):
        TenantQueue(quantum=1).pop()


@settings(max_examples=60, deadline=None)
@given(
    quantum=st.integers(1, 200),
    tenants=st.integers(2, 4),
    data=st.data(),
)
def test_backlogged_tenants_get_equal_shares_over_any_interval(
    quantum: int, tenants: int, data: st.DataObject
) -> None:
    queue = TenantQueue(quantum=quantum)
    sizes = st.tuples(st.integers(1, 100), st.integers(0, 100))
    kinds = [data.draw(st.lists(sizes, min_size=1, max_size=4)) for _ in range(tenants)]
    largest = [max(p for p, _ in kind) + max(g for _, g in kind) for kind in kinds]
    for i in range(tenants * 3):
        queue.append(of(str(i % tenants), i, *kinds[i % tenants][i % len(kinds[i % tenants])]))
    taken = Counter[int]()
    history: list[list[int]] = []
    for i in range(150):
        item = queue.pop()
        tenant = int(item.scheduling.tenant)
        kind = kinds[tenant]
        queue.append(of(item.scheduling.tenant, 1000 + i, *kind[i % len(kind)]))
        assert isinstance(item, Item)
        queue.served(item, item.generated)
        taken[tenant] += item.num_prompt_tokens + item.generated
        history.append([taken[t] for t in range(tenants)])
    for a in range(tenants):
        for b in range(a):
            gaps = [row[a] - row[b] for row in history]
            assert max(gaps) - min(gaps) <= quantum + largest[a] + largest[b]


class TenantMachine(RuleBasedStateMachine):
    """Any order of calls loses nothing, and one tenant alone sees a `WaitingQueue`."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = TenantQueue(quantum=7, max_wait_seconds=60.0)
        self.alone = TenantQueue(quantum=7)
        self.plain = WaitingQueue()
        self.waiting: list[SchedulableRequest] = []
        self.left: list[SchedulableRequest] = []
        self.now, self.next_id = 0.0, 0

    @rule(tenant=st.sampled_from("abcd"), tokens=st.integers(1, 30), priority=st.integers(-1, 1))
    def append(self, tenant: str, tokens: int, priority: int) -> None:
        self.now += 1.0
        item = new(
            self.next_id, SchedulingParameters(tenant=tenant, priority=priority), tokens, self.now
        )
        self.next_id += 1
        self.queue.append(item)
        self.waiting.append(item)
        mine = new(item.request_id, SchedulingParameters(priority=priority), tokens, self.now)
        self.alone.append(mine)
        self.plain.append(mine)
        assert self.alone.ahead(SchedulingParameters(), self.now) == self.plain.ahead(
            SchedulingParameters(), self.now
        )

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        head = self.queue.head()
        assert head is self.queue.head()
        item = self.queue.pop()
        assert item is head
        same = [
            other for other in self.waiting if other.scheduling.tenant == item.scheduling.tenant
        ]
        assert item is min(
            same, key=lambda i: (i.queued_at - i.scheduling.priority * 10, i.request_id)
        )
        self.waiting.remove(item)
        self.left.append(item)
        if len(self.plain):
            assert self.alone.pop() is self.plain.pop()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.waiting))
        assert self.queue.discard(item)
        assert not self.queue.discard(item)
        self.waiting.remove(item)

    @precondition(lambda self: self.left)
    @rule(data=st.data(), tokens=st.integers(1, 50))
    def serve(self, data: st.DataObject, tokens: int) -> None:
        self.queue.served(data.draw(st.sampled_from(self.left)), tokens)

    @rule(seconds=st.integers(0, 30))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        gone = [item for item in self.waiting if item.queued_at + 60.0 < self.now]
        assert self.queue.expired(self.now) == gone
        self.waiting = [item for item in self.waiting if item not in gone]

    @invariant()
    def nothing_is_lost(self) -> None:
        assert sorted(i.request_id for i in self.queue) == sorted(
            i.request_id for i in self.waiting
        )
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_prompt_tokens == sum(i.num_prompt_tokens for i in self.waiting)
        assert (self.queue.head() is None) == (not self.waiting)
        number, tokens = self.queue.ahead(SchedulingParameters(tenant="a"), self.now)
        assert 0 <= number <= len(self.queue)
        assert 0 <= tokens <= self.queue.num_prompt_tokens


TestTenants = TenantMachine.TestCase
TestTenants.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
