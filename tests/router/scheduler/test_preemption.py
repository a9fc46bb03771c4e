"""Preemption for blocks and for other tenants: the choice of requests, and their readmission."""

from __future__ import annotations

from dataclasses import replace

from millrace_router.request.entry import Entry, entry_of
from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.preemption import row_to_yield
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.queue import WaitingQueue
from millrace_router.scheduler.step_plan import Budgets, Row, StepPlan
from millrace_router.scheduler.tenants import TenantQueue
from millrace_testing.router.fake_router import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
BUDGETS = Budgets(max_batch_prefill_tokens=64, max_batch_size=4)


def entry(number: int, prompt: int, new: int, tenant: str = "") -> Entry:
    request = ValidRequest(
        input_ids=tuple(number * 7 % 90 for _ in range(prompt)),
        max_new_tokens=new,
        ignore_eos=True,
        scheduling=SchedulingParameters(tenant=tenant),
    )
    return Entry(number, request, TOKENIZER, frozenset(), block_size=4)


def rows(*tenants: str) -> list[Row]:
    return [
        Row(entry(i, 4, 4, tenant), slot=i, seniority=i, num_inputs=4, max_tokens=4)
        for i, tenant in enumerate(tenants)
    ]


class Run:
    """A planner whose steps are answered at once, with token 1 for every row."""

    def __init__(
        self, budgets: Budgets, waiting: WaitingQueue | TenantQueue, num_blocks: int
    ) -> None:
        self.waiting = waiting
        self.planner = Planner(budgets, BlockManager(num_blocks, 4, PrefixCache()))
        self.number = 0

    def step(self) -> StepPlan | None:
        planner = self.planner
        plan = planner.plan(self.waiting, last_sent=self.number, last_answered=self.number)
        if plan is None:
            return None
        self.number += 1
        planner.computed(plan)
        finished = [slot for slot, _ in plan.chunks if not planner.rows[slot].num_prompt_left]
        for slot in finished + plan.decodes:
            row = planner.row(slot)
            assert row is not None
            if entry_of(row.entry).accept(1, -0.5, ()):
                planner.drop(row)
        planner.answered(self.number)
        return plan

    def running(self) -> list[int]:
        return sorted(row.entry.request_id for row in self.planner.rows.values())


def test_the_largest_tenants_most_junior_row_yields() -> None:
    batch = rows("a", "b", "a", "b", "b")
    assert row_to_yield(batch, "c") is batch[4]
    assert row_to_yield(batch, "a") is None
    assert row_to_yield(rows("a", "a"), "b") is not None
    assert row_to_yield(rows("a"), "b") is None
    assert row_to_yield([], "b") is None


def test_a_row_with_a_promise_does_not_yield() -> None:
    batch = rows("a", "a", "a")
    batch[2].promised = True
    assert row_to_yield(batch, "b") is batch[1]


def test_the_most_junior_goes_when_blocks_run_short_and_comes_back_where_it_was() -> None:
    run = Run(BUDGETS, WaitingQueue(), num_blocks=1 + 8)
    entries = [entry(i, 4, 20) for i in range(3)]
    for one in entries:
        run.waiting.append(one)
    seen_preempted = set[int]()
    while run.step() is not None:
        generated = [one.num_generated for one in entries]
        assert generated == sorted(generated, reverse=True)
        seen_preempted |= {one.request_id for one in entries if one.num_preemptions}
    assert [one.generated_ids for one in entries] == [[1] * 20] * 3
    assert entries[0].num_preemptions == 0
    assert seen_preempted
    assert all(one.num_preemptions <= BUDGETS.max_preemptions for one in entries)
    assert run.planner.blocks.num_owned == 0


def test_with_full_reservation_no_row_is_preempted() -> None:
    run = Run(replace(BUDGETS, reserve_all=True), WaitingQueue(), num_blocks=1 + 8)
    entries = [entry(i, 4, 20) for i in range(3)]
    for one in entries:
        run.waiting.append(one)
    run.step()
    assert run.running() == [0]
    while run.step() is not None:
        pass
    assert [one.num_preemptions for one in entries] == [0, 0, 0]
    assert [one.generated_ids for one in entries] == [[1] * 20] * 3


def test_a_tenant_who_comes_late_gets_half_of_the_slots() -> None:
    run = Run(replace(BUDGETS, share_slots=True), TenantQueue(quantum=8), num_blocks=200)
    large = [entry(i, 4, 300, "large") for i in range(8)]
    for one in large:
        run.waiting.append(one)
    for _ in range(5):
        run.step()
    assert run.running() == [0, 1, 2, 3]
    small = [entry(100 + i, 4, 12, "small") for i in range(5)]
    for one in small:
        run.waiting.append(one)
    for _ in range(6):
        run.step()
    assert run.running() == [0, 1, 100, 101]
    while not all(one.num_generated == 12 for one in small):
        assert run.step() is not None
    while run.step() is not None:
        pass
    assert all(one.num_generated == 300 for one in large)
    assert [one.num_preemptions for one in small] == [0] * 5
    assert max(one.num_preemptions for one in large) <= BUDGETS.max_preemptions


def test_slots_are_not_shared_unless_that_is_asked_for() -> None:
    run = Run(BUDGETS, TenantQueue(quantum=8), num_blocks=200)
    for i in range(4):
        run.waiting.append(entry(i, 4, 50, "large"))
    run.step()
    run.waiting.append(entry(9, 4, 5, "small"))
    for _ in range(5):
        run.step()
    assert run.running() == [0, 1, 2, 3]
