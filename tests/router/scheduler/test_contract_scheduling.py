"""TGI's own cases for the queue and the batching loop (contract 2.1, 2.2, 9.1), on our planner.

Where we differ by design:

* Growing reservation is the default; TGI's whole reservation is `reserve_all`, which these cases use.
* A batch that turns out too small is not assembled and put back: it is counted first, so nothing has to be undone.
* Who leaves the queue is taken out at once, not when its turn comes.
* With chunking, decodes take part of the budget and of the same step, and several prompts may be unfinished.
* A budget of 0 tokens and padded batches do not exist.
"""

from __future__ import annotations

import pytest

from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.budgets import Budgets
from millrace_router.scheduler.step_plan import StepPlan
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_shard import HashShard


def new_driver(
    *,
    prefill: int = 100,
    rows: int = 16,
    num_tokens: int = 16,
    block_size: int = 1,
    prefill_chunking: bool = True,
    waiting_served_ratio: float = 0.3,
    max_waiting_tokens: int = 20,
    max_draft_tokens: int = 0,
) -> ScheduleDriver:
    """Block size 1, no prefix cache, 16 tokens: the setting of TGI's queue tests."""
    budgets = Budgets(
        max_batch_prefill_tokens=prefill,
        max_batch_size=rows,
        reserve_all=True,
        prefill_chunking=prefill_chunking,
        waiting_served_ratio=waiting_served_ratio,
        max_waiting_tokens=max_waiting_tokens,
        max_draft_tokens=max_draft_tokens,
    )
    shard = HashShard(
        num_blocks=num_tokens // block_size + 1,
        block_size=block_size,
        max_batch_size=rows,
        max_draft_tokens=max_draft_tokens,
    )
    return ScheduleDriver(budgets, shard, prefix_caching=False, depth=1)


def append(driver: ScheduleDriver, *, prompt: int = 1, new: int = 1) -> None:
    driver.submit(ValidRequest(input_ids=(1,) * prompt, max_new_tokens=new))


def next_batch(driver: ScheduleDriver) -> list[int]:
    """Ids of the requests that the next step admits."""
    plan = driver.send()
    if plan is None:
        return []
    driver.receive()
    return [row.entry.request_id for row in plan.admitted]


def kinds(driver: ScheduleDriver) -> str:
    """P for each step that computed prompts, D for each that decoded, M for each that did both."""
    return "".join(kind(plan) for plan in driver.plans if plan.has_forward)


def kind(plan: StepPlan) -> str:
    if plan.chunks:
        return "M" if plan.decodes else "P"
    return "D"


class TestQueue:
    """9.1, and the steps of 2.1 that it rests on."""

    def test_entries_get_increasing_ids_from_0(self) -> None:
        driver = new_driver()
        append(driver)
        append(driver)
        assert [entry.request_id for entry in driver.waiting] == [0, 1]

    def test_nothing_comes_from_an_empty_queue(self) -> None:
        assert next_batch(new_driver()) == []

    def test_what_waits_comes_together(self) -> None:
        driver = new_driver(prefill=2)
        append(driver)
        append(driver)
        assert next_batch(driver) == [0, 1]

    def test_too_few_for_the_minimum_stay_in_order(self) -> None:
        """`min_size` comes from waiting_served_ratio; nothing is taken, and so nothing has to be given back."""
        driver = new_driver(prefill=3, prefill_chunking=False, waiting_served_ratio=1.2)
        for _ in range(3):
            append(driver, new=4)
        assert next_batch(driver) == [0, 1, 2]
        append(driver)
        append(driver)
        assert next_batch(driver) == []
        assert [entry.request_id for entry in driver.waiting] == [3, 4]
        assert driver.planner.blocks.num_reserved == 12
        append(driver)
        assert next_batch(driver) == [3, 4, 5]

    def test_no_more_than_max_size(self) -> None:
        driver = new_driver(rows=1)
        append(driver)
        append(driver)
        assert next_batch(driver) == [0]
        assert len(driver.waiting) == 1

    def test_the_prefill_budget_ends_a_batch(self) -> None:
        driver = new_driver(prefill=1)
        append(driver)
        append(driver)
        assert next_batch(driver) == [0]
        driver = new_driver(prefill=3)
        for _ in range(4):
            append(driver)
        assert next_batch(driver) == [0, 1, 2]

    @pytest.mark.parametrize("prefill", [5, 6, 7, 8])
    def test_without_chunking_the_budget_is_rounded_up_to_blocks(self, prefill: int) -> None:
        driver = new_driver(prefill=prefill, block_size=4, num_tokens=64, prefill_chunking=False)
        append(driver, prompt=4)
        append(driver, prompt=4)
        append(driver, prompt=1)
        assert next_batch(driver) == [0, 1]

    def test_with_chunking_the_last_prompt_is_cut_without_it_left(self) -> None:
        for prefill_chunking, admitted in ((True, [0, 1]), (False, [0])):
            driver = new_driver(prefill=4, prefill_chunking=prefill_chunking)
            append(driver, prompt=3)
            append(driver, prompt=3)
            assert next_batch(driver) == admitted

    def test_blocks_end_a_batch_and_the_head_is_not_overtaken(self) -> None:
        """input_length + max_new_tokens - 1 positions each; the token budget is not compared."""
        driver = new_driver(num_tokens=16)
        append(driver, prompt=5, new=6)
        append(driver, prompt=5, new=6)
        append(driver)
        assert next_batch(driver) == [0]
        assert [entry.request_id for entry in driver.waiting] == [1, 2]

    @pytest.mark.parametrize(("num_tokens", "admitted"), [(5, [0]), (6, [0, 1])])
    def test_draft_tokens_are_reserved_too(self, num_tokens: int, admitted: list[int]) -> None:
        """input_length + max_new_tokens + speculate - 1 each, here 3; TGI's padded case counts as many."""
        driver = new_driver(num_tokens=num_tokens, max_draft_tokens=2)
        append(driver)
        append(driver)
        assert next_batch(driver) == admitted
        driver.run()
        driver.check_idle()

    def test_draft_tokens_keep_no_request_out_that_fits_without_them(self) -> None:
        """In TGI this request waits for ever; here there are no draft tokens beyond the last token."""
        driver = new_driver(num_tokens=16, max_draft_tokens=4)
        append(driver, prompt=5, new=12)
        assert next_batch(driver) == [0]
        assert driver.planner.blocks.num_reserved == 16
        driver.run()
        driver.check_idle()

    def test_who_has_left_is_dropped(self) -> None:
        """TGI notices when the entry is popped; here it leaves the queue at once."""
        driver = new_driver()
        append(driver)
        driver.clients[0].leave()
        assert len(driver.waiting) == 0
        assert next_batch(driver) == []


class TestLoop:
    """2.2: when prompts interrupt decodes."""

    def test_with_chunking_prompts_are_computed_beside_the_decodes(self) -> None:
        driver = new_driver(num_tokens=64)
        append(driver, new=4)
        driver.turn()
        append(driver, new=2)
        driver.run()
        assert kinds(driver) == "PMDD"
        assert [plan.concat_reason for plan in driver.plans[:2]] == [None, "chunking"]

    def test_draft_tokens_do_not_turn_chunking_off(self) -> None:
        """In TGI they do; here a prompt is cut to the part of the step that decodes and draft tokens leave."""
        driver = new_driver(prefill=12, num_tokens=64, max_draft_tokens=2)
        append(driver, new=12)
        driver.turn()
        append(driver, prompt=20, new=2)
        driver.run()
        driver.check_idle()
        assert kinds(driver).startswith("PMM")
        plan = driver.plans[1]
        assert (plan.decode_tokens, plan.chunks[0][1]) == ([3], 9)

    def test_without_it_enough_prompts_pause_the_decodes_for_one_step(self) -> None:
        driver = new_driver(num_tokens=64, prefill_chunking=False, waiting_served_ratio=1.0)
        append(driver, new=6)
        append(driver, new=6)
        driver.turn()
        append(driver)
        driver.turn()
        append(driver)
        driver.run()
        assert kinds(driver) == "PDPDDDD"
        assert driver.plans[2].concat_reason == "backpressure"

    def test_between_two_pauses_there_is_a_decode(self) -> None:
        """TGI tries to admit once before each decode, so prompts that keep coming cannot stop the running ones."""
        driver = new_driver(
            prefill=1, num_tokens=64, prefill_chunking=False, waiting_served_ratio=0.0
        )
        for _ in range(4):
            append(driver, new=4)
        driver.run()
        assert kinds(driver).startswith("PPDPDPD")

    def test_too_few_wait_until_max_waiting_tokens_have_been_decoded(self) -> None:
        """The count begins at 1 with each prefill, so max_waiting_tokens - 1 steps of decodes come between."""
        driver = new_driver(
            num_tokens=64,
            prefill_chunking=False,
            waiting_served_ratio=5.0,
            max_waiting_tokens=4,
        )
        append(driver, new=12)
        driver.turn()
        append(driver, new=2)
        driver.run()
        assert kinds(driver).startswith("PDDDPD")
        assert driver.plans[4].concat_reason == "wait_exceeded"
