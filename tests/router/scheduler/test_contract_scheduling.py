"""TGI's own cases for the queue and the batching loop (contract 2.1, 2.2, 9.1), on our planner.

Where we differ by design:

* Growing reservation is the default; TGI's whole reservation is `reserve_all`, which these cases use.
* Prompts never pause decodes, so `waiting_served_ratio` and `max_waiting_tokens` have nothing to decide.
* Who leaves the queue is taken out at once, not when its turn comes.
* Decodes take part of the budget and of the same step, and several prompts may be unfinished.
* A budget of 0 tokens and padded batches do not exist.
"""

from __future__ import annotations

import pytest

from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.step_plan import Budgets, StepPlan
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_shard import HashShard


def new_driver(
    *,
    prefill: int = 100,
    rows: int = 16,
    num_tokens: int = 16,
    block_size: int = 1,
    max_draft_tokens: int = 0,
) -> ScheduleDriver:
    """Block size 1, no prefix cache, 16 tokens: the setting of TGI's queue tests."""
    budgets = Budgets(
        max_batch_prefill_tokens=prefill,
        max_batch_size=rows,
        reserve_all=True,
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

    def test_a_batch_holds_at_most_its_max_size(self) -> None:
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

    def test_the_last_prompt_of_a_batch_is_cut(self) -> None:
        driver = new_driver(prefill=4)
        append(driver, prompt=3)
        append(driver, prompt=3)
        assert next_batch(driver) == [0, 1]

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
    """2.2: prompts and decodes of a step."""

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
