"""Epochs that begin with kept KV: rows are cut at any moment, and go on where answered steps have left them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from millrace_router.request.request import ValidRequest
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.queue import WaitingQueue
from millrace_router.scheduler.step_plan import Budgets
from millrace_testing.adapters.fake_adapters import adapters_for
from millrace_testing.router.fake_router import request
from millrace_testing.schedules.driver import ScheduleDriver, check_blocks
from millrace_testing.schedules.requests import MAX_PROMPT, VERSIONS, policies, valid_requests
from millrace_testing.shards.hash_choices import Choices, RandomLengths
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.hash_tokens import expected_tokens


@dataclass(frozen=True)
class Cut:
    """The end of an epoch, after some turns of the one before."""

    num_turns: int
    num_sent: int
    """Further steps that are sent and not answered."""
    fails: bool
    """Whether the last of them fails on the shard, else the stream ends."""
    keeps_kv: bool
    loses_adapters: bool
    batch_size: int
    """The most rows in the next epoch; the rest stay parked."""
    num_leaving: int
    """Clients that leave meanwhile."""


cuts = st.builds(
    Cut,
    num_turns=st.integers(0, 12),
    num_sent=st.integers(0, 3),
    fails=st.booleans(),
    keeps_kv=st.sampled_from([True, True, True, False]),
    loses_adapters=st.booleans(),
    batch_size=st.integers(1, 6),
    num_leaving=st.sampled_from([0, 0, 0, 1, 2]),
)


@st.composite
def drivers(draw: st.DrawFn) -> tuple[ScheduleDriver, list[ValidRequest]]:
    """A driver with requests, some of them equal, of which few or many fit at once."""
    budgets = draw(policies)
    block_size, seed = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(0, 2**16))
    num_blocks = 2 + (12 + draw(st.integers(0, 100))) // block_size
    shard = HashShard(
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_size=budgets.num_slots,
        eos_every=draw(st.sampled_from([0, 0, 30])),
        max_draft_tokens=budgets.max_draft_tokens,
        choices=Choices(seed),
        adapters=adapters_for(VERSIONS, max_adapters=2, num_pages=2),
        # States cannot go back behind a rejected draft token.
        state_pages=0 if budgets.max_draft_tokens else draw(st.sampled_from([0, 2, 4, 20])),
    )
    most = budgets.max_draft_tokens
    driver = ScheduleDriver(
        budgets,
        shard,
        prefix_caching=draw(st.sampled_from([True, True, False])),
        depth=draw(st.integers(1, 3)),
        drafts=RandomLengths(seed, most) if most else None,
    )
    capacity = (num_blocks - 1) * block_size
    one = valid_requests(
        longest=min(MAX_PROMPT, capacity),
        capacity=capacity,
        eos_every=shard.eos_every,
        adapters=draw(st.booleans()),
    )
    distinct = draw(st.lists(one, min_size=1, max_size=5))
    return driver, [each for each in distinct for _ in range(draw(st.integers(1, 3)))]


@settings(deadline=None, max_examples=200)
@given(drivers(), st.lists(cuts, min_size=1, max_size=8))
def test_rows_that_are_cut_at_any_moment_yield_the_tokens_of_undisturbed_ones(
    case: tuple[ScheduleDriver, list[ValidRequest]], cuts: list[Cut]
) -> None:
    driver, requests = case
    for each in requests:
        driver.submit(each)
    for cut in cuts:
        for _ in range(cut.num_turns):
            driver.turn()
            driver.check()
        for _ in range(cut.num_sent):
            if len(driver.flights) < driver.depth:
                driver.send()
        for number in driver.unended()[: cut.num_leaving]:
            driver.clients[number].leave()
        _cut(driver, cut)
        driver.check()
    driver.limits = driver.budgets
    driver.planner.limit(driver.budgets)
    work = sum(len(each.input_ids) + each.max_new_tokens + 6 for each in requests)
    driver.run(most=200 + 20 * work)
    driver.check_idle()
    assert not driver.planner.blocks.has_parked
    event("kept" if driver.num_kept else "nothing kept")


def _cut(driver: ScheduleDriver, cut: Cut) -> None:
    size = min(cut.batch_size, driver.budgets.max_batch_size)
    driver.limits = replace(driver.budgets, max_batch_size=size)
    driver.keeps_kv, driver.loses_adapters = cut.keeps_kv, cut.loses_adapters
    if cut.fails and len(driver.flights) < driver.depth:
        driver.shard.fail_next = "out of memory"
        driver.send()
        driver.shard.fail_next = None
    driver.cut()


def driver_over(shard: HashShard, *, prefix_caching: bool = True, size: int = 8) -> ScheduleDriver:
    budgets = Budgets(max_batch_prefill_tokens=64, max_batch_size=size)
    return ScheduleDriver(budgets, shard, prefix_caching=prefix_caching)


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_kept_positions_are_not_computed_again(keeps_kv: bool) -> None:
    driver = driver_over(HashShard(block_size=8), prefix_caching=False)
    for number in range(4):
        driver.submit(request([number] * 13, 20))
    for _ in range(6):
        driver.turn()
    driver.keeps_kv = keeps_kv
    num_computed = sum(row.num_computed for row in driver.planner.rows.values())
    num_prefilled = driver.shard.num_prefilled
    driver.cut()
    driver.turn()
    assert (driver.num_kept, driver.num_recomputed) == (
        (num_computed, 0) if keeps_kv else (0, num_computed)
    )
    # The last known token of each row is computed in any case.
    num_again = 4 if keeps_kv else num_computed + 4
    assert driver.shard.num_prefilled - num_prefilled == num_again
    driver.run()
    driver.check_idle()


def test_rows_beyond_smaller_limits_stay_parked_until_their_turn() -> None:
    driver = driver_over(HashShard(block_size=8), prefix_caching=False)
    clients = [driver.submit(request([number] * 13, 12)) for number in range(6)]
    for _ in range(5):
        driver.turn()
    counts = [-(-row.num_computed // 8) for row in driver.planner.rows.values()]
    driver.keeps_kv, driver.limits = True, replace(driver.budgets, max_batch_size=2)
    driver.cut()
    driver.turn()
    blocks = driver.planner.blocks
    assert (len(driver.planner.rows), driver.planner.num_paused) == (2, 4)
    assert blocks.num_parked == sum(counts[2:])
    clients[5].leave()
    driver.turn()
    assert blocks.num_parked == sum(counts[2:5])
    driver.run()
    assert driver.num_recomputed == 0
    driver.check_idle()


def test_the_most_junior_parked_request_gives_way_to_rows_that_grow() -> None:
    shard = HashShard(num_blocks=1 + 12, block_size=4)
    driver = driver_over(shard, prefix_caching=False, size=4)
    for number in range(3):
        driver.submit(request([number] * 6, 30))
    for _ in range(5):
        driver.turn()
    driver.keeps_kv, driver.limits = True, replace(driver.budgets, max_batch_size=1)
    driver.cut()
    driver.turn()
    assert list(driver.planner.blocks._parked) == [1, 2]
    for _ in range(36):
        if len(driver.planner.blocks._parked) < 2:
            break
        driver.turn()
    assert list(driver.planner.blocks._parked) == [1]
    assert [row.entry.request_id for row in driver.planner.rows.values()] == [0]
    driver.limits = driver.budgets
    driver.planner.limit(driver.budgets)
    driver.run()
    assert 0 < driver.num_recomputed < 40
    driver.check_idle()


def test_samples_of_one_prompt_keep_their_shared_and_their_own_blocks() -> None:
    """The third block is in the cache only once, although all rows have computed the same tokens."""
    driver = driver_over(HashShard(block_size=4))
    for _ in range(3):
        driver.submit(request([7] * 11, 9))
        driver.turn()
    for _ in range(3):
        driver.turn()
    rows = driver.planner.rows.values()
    tables = {
        row.entry.request_id: list(driver.planner.blocks._holdings[row.slot].blocks) for row in rows
    }
    counts = {row.entry.request_id: -(-row.num_computed // 4) for row in rows}
    driver.keeps_kv = True
    driver.cut()
    parked = driver.planner.blocks._parked
    assert {number: each.blocks for number, each in parked.items()} == {
        number: table[: counts[number]] for number, table in tables.items()
    }
    assert parked[0].blocks[:2] == parked[2].blocks[:2]
    assert len({each.blocks[-1] for each in parked.values()}) == 3
    driver.run()
    assert driver.num_recomputed == 0
    driver.check_idle()


def test_prompts_that_want_log_probabilities_are_computed_again() -> None:
    driver = driver_over(HashShard(block_size=4))
    client = driver.submit(replace(request([7] * 50, 3), prefill_logprobs=True))
    driver.limits = replace(driver.budgets, max_batch_prefill_tokens=20)
    driver.planner.limit(driver.limits)
    driver.send()
    driver.receive()
    driver.keeps_kv = True
    driver.cut()
    assert not driver.planner.blocks.has_parked
    driver.run()
    assert client.stream.prompt_logprobs is not None
    driver.check_idle()


def test_tokens_that_were_not_delivered_are_not_kept() -> None:
    """A block whose last position has to be computed again is shared, so none of that block is kept."""
    driver = driver_over(HashShard(block_size=4))
    client = driver.submit(request([1, 2, 3, 4, 5], 8))
    for _ in range(3):
        driver.turn()
    plan = driver.flights[0].plan
    driver.planner.computed(plan)
    (row,) = driver.planner.rows.values()
    assert row.num_computed == row.entry.num_inputs == 8
    driver.planner.park()
    parked = driver.planner.blocks.parked(0)
    assert parked is not None
    assert (parked.num_positions, len(parked.blocks)) == (4, 1)
    assert client.tokens == expected_tokens([1, 2, 3, 4, 5], 8)[:3]


def parked_planner(*holdings: tuple[int, int]) -> tuple[Planner, list[SchedulableRequest]]:
    """A planner over 6 blocks of 4 positions, and requests that have parked (positions, of tokens)."""
    blocks, requests = BlockManager(7, 4, PrefixCache()), list[SchedulableRequest]()
    for number, (positions, num_tokens) in enumerate(holdings):
        blocks.admit(number, positions)
        blocks.grow(number, positions)
        requests.append(
            SchedulableRequest(
                request_id=number,
                num_prompt_tokens=num_tokens,
                max_new_tokens=1,
                adapter=VERSIONS[0],
            )
        )
        blocks.park(number, requests[-1], number, positions)
    return Planner(Budgets(max_batch_prefill_tokens=64, max_batch_size=8), blocks), requests


@pytest.mark.parametrize("positions", [0, 8])
def test_a_request_that_lacks_blocks_takes_those_of_a_junior_that_is_held_back(
    positions: int,
) -> None:
    planner, requests = parked_planner((positions, 9), (14, 15))
    planner.readmit([(0, requests[0])])
    plan = planner.plan(WaitingQueue(), last_sent=0, last_answered=0)
    assert plan is not None
    assert [(row.num_cached, row.num_kept) for row in plan.admitted] == [(positions, positions)]
    assert planner.blocks.parked(1) is None
    check_blocks(planner.blocks)


def test_a_request_takes_no_parked_blocks_where_others_are_free() -> None:
    planner, requests = parked_planner((8, 9), (9, 10))
    planner.readmit([(0, requests[0])])
    assert planner.plan(WaitingQueue(), last_sent=0, last_answered=0) is not None
    assert planner.blocks.parked(1) is not None
    assert (planner.blocks.num_owned, planner.blocks.num_parked) == (3, 3)


def test_a_request_that_leaves_for_its_adapter_keeps_nothing() -> None:
    planner, requests = parked_planner((8, 9), (9, 10))
    planner.readmit(list(enumerate(requests)))
    planner.expulsion.digests = {VERSIONS[0].digest}
    assert planner.plan(WaitingQueue(), last_sent=0, last_answered=0) is None
    assert planner.expulsion.take() == requests
    assert not planner.blocks.has_parked
    assert planner.blocks.num_free == 6


def test_blocks_that_fill_after_a_cut_are_shared_at_once() -> None:
    driver = driver_over(HashShard(block_size=4))
    driver.submit(request([7] * 6, 20))
    driver.send()
    driver.receive()
    driver.keeps_kv = True
    driver.cut()
    for _ in range(2):
        driver.send()
        driver.receive()
    (row,) = driver.planner.rows.values()
    assert row.num_computed == 8
    assert len(driver.planner.blocks.find(row.entry.block_keys(2))) == 2
