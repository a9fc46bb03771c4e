"""Which rows a step has with static batching, and with the router's own planner beside it."""

from __future__ import annotations

from typing import Any

import pytest
from bench.policies.static_planner import NaivePlanner
from bench.policies.static_server import PLANNERS
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.step_plan import Budgets
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_shard import HashShard

LENGTHS = [2, 7, 4, 3, 9, 1]
"""New tokens of the requests; the prompts have four tokens."""


class PolicyDriver(ScheduleDriver):
    """A driver with the planner of a policy."""

    def __init__(
        self, planner: type[Planner], budgets: Budgets, shard: HashShard, **options: Any
    ) -> None:
        self.kind = planner
        super().__init__(budgets, shard, **options)

    def _new_planner(self) -> Planner:
        cache = PrefixCache() if self.prefix_caching else None
        blocks = BlockManager(self.shard.num_blocks, self.shard.block_size, cache)
        return self.kind(self.budgets, blocks, self.cost, self.drafts)

    def counts(self, slot: int) -> bool:
        return not (isinstance(self.planner, NaivePlanner) and slot in self.planner.padding)


def driver_of(
    policy: str,
    *,
    rows: int = 3,
    num_blocks: int = 60,
    budget: int = 40,
    prefix_caching: bool = False,
) -> ScheduleDriver:
    budgets = Budgets(
        max_batch_prefill_tokens=budget,
        max_batch_size=rows,
        spare_slots=rows,
    )
    shard = HashShard(num_blocks=num_blocks, block_size=4, max_batch_size=budgets.num_slots)
    driver = PolicyDriver(
        PLANNERS.get(policy, Planner), budgets, shard, prefix_caching=prefix_caching
    )
    for number, length in enumerate(LENGTHS):
        driver.submit(ValidRequest(input_ids=(number,) * 4, max_new_tokens=length))
    return driver


def batches(driver: ScheduleDriver) -> list[set[int]]:
    """Requests of each step with a forward pass, in turn; every output is checked, and nothing is left over."""
    found = []
    slots: dict[int, int] = {}
    driver.run()
    for plan in driver.plans:
        slots |= {row.slot: row.entry.request_id for row in plan.admitted}
        if plan.has_forward:
            found.append({slots[slot] for slot in [*dict(plan.chunks), *plan.decodes]})
    driver.check_idle()
    return found


def test_no_batching_runs_one_request_at_a_time_in_order() -> None:
    found = batches(driver_of("none", rows=1))
    assert all(len(step) == 1 for step in found)
    order = [next(iter(step)) for step in found]
    assert order == sorted(order)


def test_a_static_batch_admits_no_request_before_all_have_ended() -> None:
    found = batches(driver_of("static"))
    assert found[0] == {0, 1, 2}
    first = [step for step in found if step & {0, 1, 2}]
    assert all(step <= {0, 1, 2} for step in first)
    assert found[: len(first)] == first, "the second batch began before the first had ended"
    assert first[-1] == {1}, "ended rows are still decoded"
    assert found[len(first)] == {3, 4, 5}


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_naive_static_batch_decodes_ended_rows_until_the_longest_ends(
    *, prefix_caching: bool
) -> None:
    driver = driver_of("static-naive", prefix_caching=prefix_caching)
    found = batches(driver)
    first = [step for step in found if step & {0, 1, 2}]
    assert LENGTHS[1] <= len(first) <= LENGTHS[1] + driver.depth
    for number in (0, 2):
        # The planner learns of an end with the answer.
        assert sum(number not in step for step in first) <= driver.depth
        assert number in first[-1]
    assert found[len(first)] == {3, 4, 5}


def test_continuous_batching_fills_a_free_slot_at_once() -> None:
    found = batches(driver_of("continuous"))
    assert {0, 1, 2} in found
    assert any(step & {1} and step & {3} for step in found)


@pytest.mark.parametrize("policy", ["static", "static-naive"])
def test_a_batch_forms_over_several_steps_of_prompts(policy: str) -> None:
    driver = driver_of(policy, budget=4)
    found = batches(driver)
    assert {1, 2} <= set().union(*found[:4])
    assert not any(step & {0, 1, 2} and step & {3, 4, 5} for step in found)


@pytest.mark.parametrize("policy", ["static", "static-naive"])
def test_requests_that_come_later_wait_for_the_batch(policy: str) -> None:
    driver = driver_of(policy, rows=8)
    driver.turn()
    driver.submit(ValidRequest(input_ids=(9,) * 4, max_new_tokens=2))
    found = batches(driver)
    late = len(LENGTHS)
    assert found[-1] == {late}
    assert not any(late in step and len(step) > 1 for step in found)


@pytest.mark.parametrize("policy", ["static", "static-naive"])
def test_a_batch_survives_preemption_and_a_client_that_leaves(policy: str) -> None:
    driver = driver_of(policy, num_blocks=8)
    driver.turn()
    driver.clients[0].leave()
    batches(driver)


def test_padding_is_dropped_when_the_last_client_leaves() -> None:
    driver = driver_of("static-naive")
    for _ in range(4):
        driver.turn()
    assert isinstance(driver.planner, NaivePlanner)
    assert len(driver.planner.padding) == 2
    driver.clients[1].leave()
    assert batches(driver)[-1] <= {3, 4, 5}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["static", "static-naive"]), st.integers(8, 40), st.booleans())
def test_every_answer_is_right_whoever_leaves(
    data: st.DataObject, policy: str, num_blocks: int, prefix_caching: bool
) -> None:
    driver = driver_of(policy, num_blocks=num_blocks, prefix_caching=prefix_caching)
    for _ in range(data.draw(st.integers(0, 30))):
        driver.turn()
        if data.draw(st.integers(0, 9)) == 0 and driver.unended():
            driver.clients[data.draw(st.sampled_from(driver.unended()))].leave()
        if data.draw(st.integers(0, 9)) == 0:
            prompt = (data.draw(st.integers(0, 3)),) * data.draw(st.integers(1, 9))
            driver.submit(
                ValidRequest(input_ids=prompt, max_new_tokens=data.draw(st.integers(1, 9)))
            )
    batches(driver)
