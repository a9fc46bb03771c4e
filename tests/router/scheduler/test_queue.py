"""WaitingQueue against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace_router.request.request import SchedulingParameters
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.queue import WaitingQueue


def new(
    request_id: int,
    queued_at: float = 0.0,
    scheduling: SchedulingParameters | None = None,
    num_prompt_tokens: int = 1,
    num_preemptions: int = 0,
) -> SchedulableRequest:
    return SchedulableRequest(
        request_id=request_id,
        queued_at=queued_at,
        scheduling=scheduling or SchedulingParameters(),
        num_prompt_tokens=num_prompt_tokens,
        num_preemptions=num_preemptions,
    )


def test_equal_priorities_are_first_come_first_served() -> None:
    queue = WaitingQueue()
    assert queue.head() is None
    items = [new(i, float(i)) for i in range(1000)]
    for item in items:
        queue.append(item)
    assert queue.ahead(SchedulingParameters(), 1000.0) == (1000, 1000)
    assert [queue.pop() for _ in items] == items
    with pytest.raises(IndexError):
        queue.pop()


def test_a_step_of_priority_is_worth_the_ageing_seconds() -> None:
    queue = WaitingQueue(ageing_seconds=10.0)
    old = new(0, 0.0)
    late, soon = (
        new(1, 10.5, SchedulingParameters(priority=1)),
        new(2, 9.5, SchedulingParameters(priority=1)),
    )
    for item in (old, late, soon):
        queue.append(item)
    assert list(queue) == [soon, old, late]


def test_ahead_counts_requests_in_the_middle_of_a_long_queue() -> None:
    queue = WaitingQueue(ageing_seconds=10.0)
    for i in range(1000):
        queue.append(new(i, float(i), num_prompt_tokens=2))
    assert queue.ahead(SchedulingParameters(priority=10), 1000.0) == (901, 1802)


def test_an_entry_that_comes_back_keeps_its_position() -> None:
    queue = WaitingQueue()
    items = [new(i, float(i)) for i in range(3)]
    for item in items:
        queue.append(item)
    first = queue.pop()
    queue.append(first)
    assert list(queue) == items


def test_one_whose_reader_left_is_gone() -> None:
    queue = WaitingQueue()
    item = new(0)
    queue.append(item)
    assert not queue.discard(new(0))
    assert queue.discard(item)
    assert not queue.discard(item)
    assert (queue.head(), len(queue), queue.num_prompt_tokens) == (None, 0, 0)


def test_the_same_id_twice_is_refused() -> None:
    queue = WaitingQueue()
    queue.append(new(0))
    with pytest.raises(ValueError, match="waits already"):
        queue.append(new(0))


def test_a_deadline_passes_once_it_is_exceeded() -> None:
    queue = WaitingQueue(max_wait_seconds=5.0)
    items = [
        new(0),
        new(1, scheduling=SchedulingParameters(max_queue_seconds=2.0)),
        new(2, num_preemptions=1),
    ]
    for item in items:
        queue.append(item)
    assert queue.expired(2.0) == []
    assert queue.expired(2.1) == [items[1]]
    assert queue.expired(9.0) == [items[0]]
    assert list(queue) == [items[2]]


def test_bad_seconds_are_refused() -> None:
    for seconds in (-1.0, float("inf")):
        with pytest.raises(ValueError, match="ageing_seconds is"):
            WaitingQueue(ageing_seconds=seconds)
    with pytest.raises(ValueError, match="max_wait_seconds is"):
        WaitingQueue(max_wait_seconds=-1.0)


class WaitingMachine(RuleBasedStateMachine):
    """Entries of any age and priority come, go and expire."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(ageing_seconds=3.0, max_wait_seconds=30.0)
        self.waiting: list[SchedulableRequest] = []
        self.now, self.next_id = 0.0, 0

    @rule(
        number=st.integers(1, 300),
        age=st.integers(0, 3),
        priority=st.integers(-10, 10),
        tokens=st.integers(1, 99),
        limit=st.none() | st.integers(0, 40),
    )
    def append(self, number: int, age: int, priority: int, tokens: int, limit: int | None) -> None:
        for _ in range(number):
            scheduling = SchedulingParameters(priority=priority, max_queue_seconds=limit)
            item = new(self.next_id, self.now - age, scheduling, tokens)
            self.next_id += 1
            self.queue.append(item)
            self.waiting.append(item)
        self.waiting.sort(key=lambda item: (self.rank(item), item.request_id))

    @rule(number=st.integers(1, 200))
    def pop(self, number: int) -> None:
        for _ in range(min(number, len(self.waiting))):
            assert self.queue.pop() is self.waiting.pop(0)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        item = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.queue.discard(item)

    @precondition(lambda self: self.waiting)
    @rule()
    def take_the_shortest(self) -> None:
        """The first of the shortest prompts among the ones of highest priority, in order of service."""
        highest = max(item.scheduling.priority for item in self.waiting)
        candidates = [item for item in self.waiting if item.scheduling.priority == highest]
        shortest = min(candidates, key=lambda item: item.num_prompt_tokens)
        assert self.queue.shortest() is shortest
        self.queue.take(shortest)
        self.waiting.remove(shortest)

    @rule(seconds=st.integers(0, 9))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        gone = [item for item in self.waiting if self.deadline(item) < self.now]
        expired = self.queue.expired(self.now)
        assert expired == sorted(gone, key=lambda item: (self.deadline(item), item.request_id))
        self.waiting = [item for item in self.waiting if item not in gone]

    @rule(priority=st.integers(-10, 10))
    def ahead(self, priority: int) -> None:
        before = [i for i in self.waiting if self.rank(i) <= self.now - priority * 3.0]
        expected = len(before), sum(item.num_prompt_tokens for item in before)
        assert self.queue.ahead(SchedulingParameters(priority=priority), self.now) == expected

    @invariant()
    def same(self) -> None:
        assert list(self.queue) == self.waiting
        assert self.queue.head() is (self.waiting[0] if self.waiting else None)
        assert (self.queue.shortest() is None) == (not self.waiting)
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_prompt_tokens == sum(i.num_prompt_tokens for i in self.waiting)

    def rank(self, item: SchedulableRequest) -> float:
        return item.queued_at - item.scheduling.priority * 3.0

    def deadline(self, item: SchedulableRequest) -> float:
        limit = item.scheduling.max_queue_seconds
        return item.queued_at + min(30.0, 30.0 if limit is None else limit)


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


class CountedFloat(float):
    """A time that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: object) -> bool:
        CountedFloat.comparisons += 1
        return float(self) < float(other)  # type: ignore[arg-type]

    def __sub__(self, other: float) -> CountedFloat:
        return CountedFloat(float(self) - other)


@pytest.mark.parametrize("number", [1_000, 30_000])
def test_operations_compare_few_of_the_items(number: int) -> None:
    queue = WaitingQueue()
    items = [new(i, CountedFloat(i)) for i in range(number)]
    for item in items:
        queue.append(item)
    late = new(
        number, CountedFloat(number), SchedulingParameters(priority=5, max_queue_seconds=1.0)
    )
    CountedFloat.comparisons = 0
    queue.append(late)
    queue.expired(0.0)
    queue.ahead(SchedulingParameters(priority=3), CountedFloat(number))
    head = queue.head()
    assert head is queue.pop()
    queue.discard(items[number // 2])
    queue.discard(late)
    assert 0 < CountedFloat.comparisons <= 8 * 20
