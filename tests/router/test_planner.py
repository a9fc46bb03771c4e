"""Planner decisions one by one; the batcher's tests cover whole runs."""

from __future__ import annotations

from millrace_fakes_router import request, tiny_tokenizer
from millrace_router.blocks import BlockTable
from millrace_router.entry import Entry
from millrace_router.planner import Budgets, Planner, Row
from millrace_router.waiting import WaitingQueue

TOKENIZER = tiny_tokenizer()


def new_planner(*, prefill: int = 8, rows: int = 4, num_blocks: int = 9) -> Planner:
    budgets = Budgets(max_batch_prefill_tokens=prefill, max_batch_size=rows)
    return Planner(budgets, BlockTable(num_blocks, 4))


def queue(*lengths: tuple[int, int]) -> WaitingQueue:
    """Entries of (prompt tokens, new tokens)."""
    waiting = WaitingQueue()
    for i, (prompt, new) in enumerate(lengths):
        waiting.append(Entry(i, request([1] * prompt, new), TOKENIZER, frozenset()))
    return waiting


def only_row(planner: Planner) -> Row:
    (row,) = planner.rows.values()
    return row


def test_slot_and_blocks_are_reused_only_after_the_last_step_that_named_them() -> None:
    planner = new_planner(rows=1)
    waiting = queue((4, 9), (4, 9))
    assert planner.plan(waiting, last_sent=0, last_answered=0) is not None
    assert planner.plan(waiting, last_sent=1, last_answered=0) is not None
    planner.drop(only_row(planner))
    dropping = planner.plan(waiting, last_sent=2, last_answered=1)
    assert dropping is not None
    assert (dropping.dropped, dropping.admitted) == ((0,), ())
    assert planner.blocks.num_in_use == 2
    planner.answered(2)
    assert planner.blocks.num_in_use == 0
    admitting = planner.plan(waiting, last_sent=3, last_answered=2)
    assert admitting is not None
    assert [row.slot for row in admitting.admitted] == [0]


def test_a_drop_with_nothing_in_flight_frees_at_once() -> None:
    planner = new_planner(rows=1)
    waiting = queue((4, 9), (4, 9))
    planner.plan(waiting, last_sent=0, last_answered=0)
    planner.drop(only_row(planner))
    plan = planner.plan(waiting, last_sent=1, last_answered=1)
    assert plan is not None
    assert (plan.dropped, [row.slot for row in plan.admitted]) == ((0,), [0])


def test_the_budget_counts_decodes_and_cuts_prompts() -> None:
    planner = new_planner(prefill=8, num_blocks=30)
    waiting = queue((3, 5), (20, 5))
    first = planner.plan(waiting, last_sent=0, last_answered=0)
    second = planner.plan(waiting, last_sent=1, last_answered=0)
    assert first is not None
    assert second is not None
    assert sorted(num_tokens for _, num_tokens in first.chunks) == [3, 5]
    assert len(second.decodes) == 1
    assert [num_tokens for _, num_tokens in second.chunks] == [7]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    planner = new_planner(num_blocks=5)
    waiting = queue((4, 5), (12, 5), (1, 1))
    plan = planner.plan(waiting, last_sent=0, last_answered=0)
    assert plan is not None
    assert [row.entry.request_id for row in plan.admitted] == [0]
    assert len(waiting) == 2


def test_no_more_tokens_are_planned_than_were_asked_for() -> None:
    planner = new_planner()
    waiting = queue((2, 3))
    plans = [planner.plan(waiting, last_sent=i, last_answered=0) for i in range(5)]
    assert [plan is not None and plan.has_forward for plan in plans] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_blocks_come_as_they_are_needed() -> None:
    planner = new_planner()
    waiting = queue((4, 6))
    plans = [planner.plan(waiting, last_sent=i, last_answered=0) for i in range(6)]
    grown = [len(plan.grown) if plan else 0 for plan in plans]
    assert grown == [1, 1, 0, 0, 0, 1]
    assert planner.blocks.num_reserved == 3
