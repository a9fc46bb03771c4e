"""Admission of requests to the batch, and the cached part of their prompts."""

from __future__ import annotations

import pytest

from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.step_plan import Budgets, Row
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


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation() -> None:
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


def test_a_prompt_whose_logprobs_are_asked_for_is_computed_whole_and_may_be_shared_later() -> None:
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


def test_who_waits_for_a_prompt_goes_on_alone_when_its_client_leaves() -> None:
    driver = new_driver(prefill=8)
    first, second = submit(driver, range(60)), submit(driver, range(60))
    driver.turn()
    first.leave()
    driver.run()
    driver.check_idle()
    assert second.finished is not None


def test_of_a_prompt_that_is_cancelled_only_what_was_computed_stays() -> None:
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
def test_what_is_not_finite_is_never_shared(prefill: int) -> None:
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
