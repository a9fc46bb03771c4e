"""Admission of requests to the batch, and the cached part of their prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
from millrace_testing.schedules.client import Client
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_shard import HashShard

SIZE = 4


def new_driver(
    *, prefill: int = 64, rows: int = 4, num_blocks: int = 64, prefix_caching: bool = True
) -> ScheduleDriver:
    return ScheduleDriver(
        Budgets(max_batch_prefill_tokens=prefill, max_batch_size=rows),
        HashShard(num_blocks=num_blocks, block_size=SIZE, max_batch_size=rows),
        prefix_caching=prefix_caching,
    )


def submit(driver: ScheduleDriver, ids: range, *, new: int = 3, logprobs: bool = False) -> Client:
    return driver.submit(
        ValidRequest(input_ids=tuple(ids), max_new_tokens=new, prefill_logprobs=logprobs)
    )


def first_rows(driver: ScheduleDriver) -> dict[int, Row]:
    """The row of each request's last admission."""
    return {row.entry.request_id: row for plan in driver.plans for row in plan.admitted}


def num_chunked(driver: ScheduleDriver) -> int:
    return sum(plan.load.prefill_tokens for plan in driver.plans)


@pytest.mark.parametrize("length", range(1, 14))
def test_a_hit_covers_at_most_the_full_blocks_before_the_last_token(length: int) -> None:
    """The last prompt token is always computed, in its own block: its logits choose the first token."""
    driver = new_driver()
    for _ in range(2):
        submit(driver, range(length), new=2 * SIZE)
        driver.run()
    driver.check_idle()
    assert driver.shard.num_hit == (length - 1) // SIZE * SIZE
    assert first_rows(driver)[1].num_cached == (length - 1) // SIZE * SIZE


def test_the_next_turn_of_a_conversation_hits_generated_tokens() -> None:
    driver = new_driver()
    first = submit(driver, range(6), new=12)
    driver.run()
    conversation = (*range(6), *first.tokens, 1, 2)
    driver.submit(ValidRequest(input_ids=conversation, max_new_tokens=2))
    driver.run()
    driver.check_idle()
    # The last token was never computed, and with it the block that it would have filled.
    assert driver.shard.num_hit == (6 + 12 - 1) // SIZE * SIZE


def test_without_a_cache_nothing_is_shared() -> None:
    driver = new_driver(prefix_caching=False)
    for _ in range(3):
        submit(driver, range(20))
    driver.run()
    driver.check_idle()
    assert driver.shard.num_hit == 0
    assert driver.planner.blocks.num_cached == 0


def test_a_prompt_with_logprobs_is_computed_whole_and_may_be_shared_later() -> None:
    driver = new_driver()
    submit(driver, range(20))
    driver.run()
    submit(driver, range(20), logprobs=True)
    driver.run()
    assert (driver.shard.num_hit, driver.shard.num_prefilled) == (0, 40)
    submit(driver, range(20))
    driver.run()
    driver.check_idle()
    assert driver.shard.num_hit == 16


def test_an_identical_prompt_waits_for_the_first_one_instead_of_computing_it_again() -> None:
    driver = new_driver(prefill=8, rows=8)
    clients = [submit(driver, range(30)) for _ in range(5)]
    assert len(driver.send().admitted) == 1  # type: ignore[union-attr]
    driver.run()
    driver.check_idle()
    assert driver.shard.num_prefilled == 30 + 4 * 2
    assert len({tuple(client.tokens) for client in clients}) == 1


def test_a_request_goes_on_when_the_one_that_computes_its_prompt_leaves() -> None:
    driver = new_driver(prefill=8)
    first, second = submit(driver, range(60)), submit(driver, range(60))
    driver.turn()
    first.leave()
    driver.run()
    driver.check_idle()
    assert second.finished is not None


def test_a_cancelled_prompt_leaves_only_its_computed_blocks() -> None:
    driver = new_driver(prefill=8)
    client = submit(driver, range(40))
    driver.send()
    driver.send()
    driver.receive()
    client.leave()
    driver.run()
    driver.check_idle()
    blocks = driver.planner.blocks
    assert blocks.num_cached == 2, "one step was answered before the client left"
    submit(driver, range(40))
    driver.run()
    driver.check_idle()
    assert driver.shard.num_hit == 8


def test_a_prompt_in_flight_is_not_shared_before_it_is_answered() -> None:
    driver = new_driver(prefill=64)
    submit(driver, range(20))
    driver.send()
    submit(driver, range(20))
    plan = driver.send()
    assert plan is not None
    assert not plan.admitted
    driver.receive()
    plan = driver.send()
    assert plan is not None
    assert [row.num_cached for row in plan.admitted] == [16]


@pytest.mark.parametrize("prefill", [8, 64])
def test_blocks_that_are_not_finite_are_never_shared(prefill: int) -> None:
    """A chunk that is not finite is reported as such, though its prompt is not complete."""
    driver = new_driver(prefill=prefill)
    driver.shard.corrupt.add(0)
    submit(driver, range(20)).may_fail = True
    healthy = submit(driver, range(20))
    driver.run()
    driver.check_idle()
    assert driver.shard.num_hit == 0
    assert healthy.finished is not None


def test_blocks_before_a_value_that_is_not_finite_may_be_shared_without_harm() -> None:
    driver = new_driver(prefill=8)
    first = submit(driver, range(40))
    first.may_fail = True
    healthy = [submit(driver, range(40)), submit(driver, range(40))]
    driver.turn()
    driver.shard.corrupt.add(0)
    driver.run()
    driver.check_idle()
    assert first.error is not None
    assert all(client.finished for client in healthy)


def test_a_new_epoch_begins_with_an_empty_cache() -> None:
    driver = new_driver()
    submit(driver, range(20))
    driver.run()
    driver.shard.fail_next = "the device caught fire"
    second = submit(driver, range(20))
    driver.run()
    driver.check_idle()
    hits = [row.num_cached for plan in driver.plans for row in plan.admitted]
    assert hits == [0, 16, 0]
    assert second.finished is not None


def test_sixty_four_requests_behind_one_system_prompt_compute_it_once() -> None:
    driver = new_driver(prefill=64, rows=16, num_blocks=400)
    for i in range(64):
        driver.submit(ValidRequest(input_ids=(*[7] * 100, i, i), max_new_tokens=2))
    driver.run()
    driver.check_idle()
    assert driver.shard.num_prefilled == num_chunked(driver) == 100 + 64 * 2


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


def test_slots_are_not_shared_among_tenants_by_default() -> None:
    run = Run(BUDGETS, TenantQueue(quantum=8), num_blocks=200)
    for i in range(4):
        run.waiting.append(entry(i, 4, 50, "large"))
    run.step()
    run.waiting.append(entry(9, 4, 5, "small"))
    for _ in range(5):
        run.step()
    assert run.running() == [0, 1, 2, 3]
