"""Pages of states: which a sequence has, where copies are taken, and what a prompt that shares a prefix computes."""

from __future__ import annotations

import pytest

from millrace_router.scheduler.block_ledger import (
    BlockLedger,
    StoredBlock,
    StoredBlocks,
    new_life,
)
from millrace_router.scheduler.factory import blocks_from
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.state_pages import StatePages
from millrace_router.scheduler.step_plan import Budgets
from millrace_testing.router.fake_router import request
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_shard import HashShard

SIZE = 64
SHARED = tuple(range(1005, 1605))


def driver(*, state_pages: int, num_blocks: int = 200, batch_size: int = 4) -> ScheduleDriver:
    budgets = Budgets(max_batch_prefill_tokens=256, max_batch_size=batch_size)
    shard = HashShard(
        num_blocks=num_blocks,
        block_size=SIZE,
        max_batch_size=budgets.num_slots,
        state_pages=state_pages,
    )
    return ScheduleDriver(budgets, shard)


def computed(run: ScheduleDriver, *prompts: tuple[int, ...], max_new_tokens: int = 3) -> list[int]:
    """Prompt tokens that each prompt computes, one after the other."""
    counts = list[int]()
    for prompt in prompts:
        before = run.shard.num_prefilled
        client = run.submit(request(list(prompt), max_new_tokens=max_new_tokens))
        run.run()
        assert client.tokens
        assert not client.wrong
        counts.append(run.shard.num_prefilled - before)
    return counts


@pytest.mark.parametrize("num_own", [1, 40, 100, 700, 3000])
def test_the_second_of_two_prompts_with_a_common_prefix_computes_little_of_it(num_own: int) -> None:
    run = driver(state_pages=300)
    first, second = (SHARED + (number,) * num_own for number in (1, 2))
    assert computed(run, first, second)[1] - num_own < 128


def test_a_prefix_that_two_prompts_have_shared_is_whole_for_the_third() -> None:
    run = driver(state_pages=64)
    prompts = [SHARED + (number,) * 5000 for number in (1, 2, 3)]
    assert computed(run, *prompts)[2] == len(prompts[2]) - len(SHARED) // SIZE * SIZE


def test_a_conversation_goes_on_behind_its_answer() -> None:
    run = driver(state_pages=64)
    client = run.submit(request(list(SHARED), max_new_tokens=100))
    run.run()
    before = run.shard.num_prefilled
    answer = tuple(client.tokens)
    run.submit(request([*SHARED, *answer, 7, 8, 9], max_new_tokens=3))
    run.run()
    assert run.shard.num_prefilled - before < SIZE + 4


def test_without_room_for_copies_no_prefix_is_cached_and_nothing_waits() -> None:
    run = driver(state_pages=2)
    prompts = [(*SHARED, number) for number in (1, 2)]
    clients = [run.submit(request(list(prompt), max_new_tokens=70)) for prompt in prompts]
    run.run()
    for client in clients:
        assert client.tokens
        assert not client.wrong
    assert run.shard.num_prefilled == sum(map(len, prompts))


def test_pages_bound_the_rows_and_every_page_comes_back() -> None:
    run = driver(state_pages=4, batch_size=8)
    for number in range(8):
        run.submit(request([number] * 70, max_new_tokens=20))
    most = 0
    while run.turn():
        most = max(most, len(run.planner.rows))
    assert most == 3
    states = run.planner.blocks.states
    assert states is not None
    assert (states.num_working, states.num_available) == (0, 3)


def test_a_row_that_is_not_finite_leaves_no_copy() -> None:
    run = driver(state_pages=20)
    sick = run.submit(request(list(SHARED), max_new_tokens=3))
    sick.may_fail = True
    run.shard.corrupt.add(0)
    run.run()
    assert sick.error is not None
    states = run.planner.blocks.states
    assert states is not None
    assert states.num_copies == 0


def test_a_pool_without_a_page_to_hand_out_is_refused() -> None:
    with pytest.raises(ValueError, match="no page to hand out"):
        StatePages(1, SIZE)


@pytest.mark.parametrize(("keeps_kv", "most"), [(True, 3 * SIZE), (False, 3 * 800)])
def test_a_sequence_goes_on_from_the_last_copy_of_its_state(*, keeps_kv: bool, most: int) -> None:
    run = driver(state_pages=40)
    run.keeps_kv = keeps_kv
    clients = [run.submit(request([number] * 600, max_new_tokens=200)) for number in range(3)]
    while min(len(client.tokens) for client in clients) < 100:
        run.turn()
    run.send()
    run.cut()
    run.run()
    run.check_idle()
    assert most // 4 < run.num_recomputed < most


def test_copies_that_no_answered_step_has_taken_end_with_their_epoch() -> None:
    run = driver(state_pages=40)
    run.keeps_kv = True
    run.submit(request(list(SHARED), max_new_tokens=3))
    run.send()
    states = run.planner.blocks.states
    assert states is not None
    assert states.num_available < states.num_pages - 1
    run.cut()
    assert (states.num_available, states.num_copies) == (states.num_pages, 0)
    run.run()
    run.check_idle()


def test_copies_are_in_the_books_that_outlive_a_shard_and_a_router() -> None:
    ledger = BlockLedger(new_life(7))
    run = driver(state_pages=40)
    run.planner.blocks.ledger = ledger
    blocks = blocks_from(200, SIZE, prefix_caching=True, ledger=ledger, state_pages=40)
    run.planner = Planner(run.budgets, blocks)
    run.submit(request(list(SHARED), max_new_tokens=3))
    run.run()
    assert blocks.states is not None
    copies = blocks.states.keys_by_page()
    assert len(copies) > 2
    assert min(copies) > 200
    changes = [plan.seals for plan in run.plans] + [ledger.take_seals()]
    held = {number: key for each in changes for number, key in each.sealed.items()}
    assert {number: held[number] for number in copies} == copies
    entries = {number: StoredBlock(*ledger._entries[number], held[number]) for number in held}
    stored = StoredBlocks(ledger.life, entries)
    assert blocks.settle([stored]) is None
    changed = entries | {min(copies): entries[min(copies)]._replace(generation=99)}
    assert blocks.settle([StoredBlocks(ledger.life, changed)]) == "entry"
    other = BlockLedger(new_life(7))
    later = blocks_from(200, SIZE, prefix_caching=True, ledger=other, state_pages=40)
    assert later.adopt([stored], 7) == len(SHARED) // SIZE
    assert later.states is not None
    assert later.states.keys_by_page() == copies
    assert later.states.num_available == later.states.num_pages
    assert later.settle([stored]) is None
