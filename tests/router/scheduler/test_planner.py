"""Planner decisions one by one; `test_scheduling.py` has whole runs in any order."""

from __future__ import annotations

import pytest

from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_router.scheduler.step_plan import Budgets, Row, StepPlan
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_shard import HashShard


def new_driver(
    *,
    prefill: int = 8,
    rows: int = 4,
    num_blocks: int = 9,
    prefix_caching: bool = False,
    reserve_all: bool = False,
    max_preemptions: int = 3,
) -> ScheduleDriver:
    budgets = Budgets(
        max_batch_prefill_tokens=prefill,
        max_batch_size=rows,
        reserve_all=reserve_all,
        max_preemptions=max_preemptions,
    )
    shard = HashShard(num_blocks=num_blocks, block_size=4, max_batch_size=rows)
    return ScheduleDriver(budgets, shard, prefix_caching=prefix_caching)


def submit(driver: ScheduleDriver, *lengths: tuple[int, int]) -> None:
    """Requests of (prompt tokens, new tokens), each with its own prompt."""
    for prompt, new in lengths:
        first = len(driver.entries)
        driver.submit(ValidRequest(input_ids=(first,) * prompt, max_new_tokens=new))


def sent(driver: ScheduleDriver) -> StepPlan:
    """The next step, which there has to be."""
    plan = driver.send()
    assert plan is not None
    return plan


def until_preemption(driver: ScheduleDriver) -> None:
    """Go on until a row is preempted, which has a step in flight then."""
    while True:
        while len(driver.flights) < driver.depth:
            if sent(driver).num_preempted:
                return
        driver.receive()


def only_row(driver: ScheduleDriver) -> Row:
    (row,) = driver.planner.rows.values()
    return row


def test_slot_and_blocks_are_reused_only_after_the_last_step_that_named_them() -> None:
    driver = new_driver(rows=1)
    submit(driver, (4, 9), (4, 9))
    sent(driver)
    sent(driver)
    driver.planner.drop(only_row(driver))
    driver.receive()
    dropping = sent(driver)
    assert (dropping.dropped, dropping.admitted) == ([0], [])
    assert driver.planner.blocks.num_owned == 2
    driver.receive()
    assert driver.planner.blocks.num_owned == 0
    assert [row.slot for row in sent(driver).admitted] == [0]


def test_a_drop_with_nothing_in_flight_frees_at_once() -> None:
    driver = new_driver(rows=1)
    submit(driver, (4, 9), (4, 9))
    sent(driver)
    driver.receive()
    driver.planner.drop(only_row(driver))
    plan = sent(driver)
    assert (plan.dropped, [row.slot for row in plan.admitted]) == ([0], [0])


def test_the_budget_counts_decodes_and_cuts_prompts() -> None:
    driver = new_driver(prefill=8, num_blocks=30)
    submit(driver, (3, 5), (20, 5))
    first, second = sent(driver), sent(driver)
    assert sorted(num_tokens for _, num_tokens in first.chunks) == [3, 5]
    assert len(second.decodes) == 1
    assert [num_tokens for _, num_tokens in second.chunks] == [7]


def test_the_load_of_a_step_counts_the_positions_that_its_rows_attend_to() -> None:
    driver = new_driver(prefill=8, num_blocks=30)
    submit(driver, (3, 5), (20, 5))
    first, second = sent(driver).load, sent(driver).load
    assert (first.num_chunks, first.prefill_tokens) == (2, 8)
    assert first.prefill_pairs == (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)
    assert (first.decodes, first.context) == (0, 0)
    assert (second.decodes, second.context) == (1, 4)
    assert second.prefill_pairs == sum(range(6, 13))


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    driver = new_driver(num_blocks=5)
    submit(driver, (4, 5), (12, 5), (1, 1))
    plan = sent(driver)
    assert [row.entry.request_id for row in plan.admitted] == [0]
    assert len(driver.waiting) == 2


def test_no_more_tokens_are_planned_than_requested() -> None:
    driver = new_driver()
    driver.depth = 5
    submit(driver, (2, 3))
    plans = [driver.send() for _ in range(5)]
    assert [plan is not None and plan.has_forward for plan in plans] == [True] * 3 + [False] * 2


def test_blocks_come_as_they_are_needed() -> None:
    driver = new_driver()
    driver.depth = 6
    submit(driver, (4, 6))
    assert [len(sent(driver).grown) for _ in range(6)] == [1, 1, 0, 0, 0, 1]
    assert driver.planner.blocks.num_owned == 3


@pytest.mark.parametrize(("reserve_all", "num_admitted"), [(True, 1), (False, 3)])
def test_full_reservation_admits_by_final_length_and_growing_by_current_length(
    reserve_all: bool, num_admitted: int
) -> None:
    """Nine blocks; a request is one block of prompt and up to eight in all."""
    driver = new_driver(prefill=64, num_blocks=10, reserve_all=reserve_all)
    submit(driver, *[(4, 29)] * 3)
    assert len(sent(driver).admitted) == num_admitted
    driver.run()
    driver.check_idle()
    assert (sum(plan.num_preempted for plan in driver.plans) > 0) is not reserve_all


def test_the_most_junior_row_is_preempted_and_goes_on_where_it_was() -> None:
    driver = new_driver(prefill=64, num_blocks=8)
    submit(driver, (4, 20), (4, 20))
    until_preemption(driver)
    assert [entry.num_preemptions for entry in driver.entries.values()] == [0, 1]
    assert driver.planner.num_paused == 1
    junior = driver.clients[1]
    num_heard = len(junior.tokens)
    assert driver.flights, "the test is about tokens in flight"
    while driver.flights:
        driver.receive()
    assert len(junior.tokens) > num_heard, "a token in flight was thrown away"
    num_heard = len(junior.tokens)
    driver.run()
    driver.check_idle()
    (replay,) = [p.admitted[0] for p in driver.plans[1:] if p.admitted]
    assert replay.entry is driver.entries[1]
    assert replay.num_inputs == 4 + num_heard, "the prompt and everything heard of it so far"
    assert replay.max_tokens == 20 - num_heard


def test_a_replay_hits_its_own_blocks_in_the_cache() -> None:
    driver = new_driver(prefill=64, num_blocks=8, prefix_caching=True)
    submit(driver, (4, 20), (4, 20))
    driver.run()
    driver.check_idle()
    assert driver.entries[1].num_preemptions == 1
    replays = [row for plan in driver.plans[1:] for row in plan.admitted]
    assert [row.num_cached > 0 for row in replays] == [True]


def test_a_preempted_entry_comes_before_those_that_wait() -> None:
    driver = new_driver(prefill=64, num_blocks=8, rows=2)
    submit(driver, (4, 20), (4, 20), (4, 2))
    driver.run()
    driver.check_idle()
    admitted = [row.entry.request_id for plan in driver.plans for row in plan.admitted]
    assert admitted == [0, 1, 1, 2]


def test_several_preempted_entries_come_back_the_most_senior_first() -> None:
    driver = new_driver(prefill=64, num_blocks=8)
    submit(driver, *[(4, 20)] * 4)
    driver.run()
    driver.check_idle()
    rows = [row for plan in driver.plans for row in plan.admitted]
    assert len(rows) > 4
    assert all(row.seniority == row.entry.request_id for row in rows), "it keeps its seniority"


def test_a_pinned_entry_leaves_the_blocks_that_earlier_entries_can_need() -> None:
    """They may not preempt it, so the most senior would wait for its end, which the driver does not let pass."""
    driver = new_driver(prefill=64, num_blocks=10, max_preemptions=1)
    submit(driver, (4, 12), (1, 20), (4, 16))
    driver.run()
    driver.check_idle()
    assert [entry.num_preemptions for entry in driver.entries.values()] == [0, 0, 1]


def test_after_some_preemptions_an_entry_is_admitted_with_all_it_can_need() -> None:
    driver = new_driver(prefill=64, num_blocks=8, max_preemptions=1)
    submit(driver, *[(4, 20)] * 4)
    driver.run()
    driver.check_idle()
    assert max(entry.num_preemptions for entry in driver.entries.values()) == 1
    replays = {row.entry.request_id: row for plan in driver.plans for row in plan.admitted}
    for entry in driver.entries.values():
        assert replays[entry.request_id].promised == (entry.num_preemptions == 1)


def test_an_entry_that_left_while_it_was_paused_is_never_admitted_again() -> None:
    driver = new_driver(prefill=64, num_blocks=8)
    submit(driver, (4, 20), (4, 20))
    until_preemption(driver)
    driver.clients[1].leave()
    driver.run()
    driver.check_idle()
    assert sum(len(plan.admitted) for plan in driver.plans) == 2


def test_a_replay_that_went_back_to_the_queue_may_be_longer_than_a_whole_step() -> None:
    budgets = Budgets(max_batch_prefill_tokens=4, max_batch_size=2, share_slots=True)
    shard = HashShard(num_blocks=20, block_size=4, max_batch_size=2)
    driver = ScheduleDriver(budgets, shard, prefix_caching=False)
    for _ in range(2):
        driver.submit(ValidRequest(input_ids=(1,) * 4, max_new_tokens=12))
    for _ in range(6):
        driver.turn()
    driver.submit(
        ValidRequest(
            input_ids=(2,) * 4, max_new_tokens=3, scheduling=SchedulingParameters(tenant="other")
        )
    )
    driver.run()
    driver.check_idle()
    assert sum(plan.num_preempted for plan in driver.plans) == 1


def test_clients_that_leave_while_yielding_do_not_queue_again() -> None:
    budgets = Budgets(max_batch_prefill_tokens=64, max_batch_size=2, share_slots=True)
    shard = HashShard(num_blocks=40, block_size=4, max_batch_size=2)
    driver = ScheduleDriver(budgets, shard, prefix_caching=False)
    submit(driver, (4, 12), (4, 12))
    for _ in range(3):
        driver.turn()
    driver.submit(
        ValidRequest(
            input_ids=(2,) * 4, max_new_tokens=3, scheduling=SchedulingParameters(tenant="other")
        )
    )
    while not any(plan.num_preempted for plan in driver.plans):
        driver.turn()
    driver.clients[1].leave()
    driver.run()
    driver.check_idle()
    assert driver.shard.num_prefilled == 12, "nothing is computed again"


def test_running_and_paused_requests_continue_after_a_failed_epoch() -> None:
    driver = new_driver(prefill=64, num_blocks=8)
    submit(driver, (4, 20), (4, 20))
    while not driver.planner._admission.num_paused:
        driver.turn()
    driver.shard.fail_next = "the device caught fire"
    driver.run()
    senior, junior = driver.clients.values()
    assert senior.finished is not None
    assert junior.finished is not None
    driver.check_idle()


def test_a_client_that_leaves_is_dropped_by_the_next_plan_even_in_the_middle_of_its_prompt() -> (
    None
):
    driver = new_driver(prefill=4, num_blocks=20)
    submit(driver, (40, 5), (30, 5))
    sent(driver)
    driver.clients[0].leave()
    plan = sent(driver)
    assert plan.dropped == [0]
    assert [row.entry.request_id for row in plan.admitted] == [1]
    driver.run()
    driver.check_idle()
    assert driver.shard.num_prefilled == 4 + 30


def test_prompt_logprobs_of_a_prompt_that_was_preempted_are_whole() -> None:
    """Log probabilities of its chunks before the preemption are not repeated."""
    driver = new_driver(prefill=4, num_blocks=12)
    submit(driver, (4, 30))
    driver.turn()
    client = driver.submit(
        ValidRequest(input_ids=(5,) * 30, max_new_tokens=2, prefill_logprobs=True)
    )
    driver.run()
    driver.check_idle()
    assert client.stream.prompt_logprobs is not None
    assert driver.entries[1].num_preemptions > 0, "the test is about a preemption"
