"""Smaller steps after one ran out of memory, and larger ones after enough succeeded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace_router.recovery.recovery_policy import STEPS_BEFORE_RELIEF, OomBackoff
from millrace_router.scheduler.step_plan import Budgets


def backoff(prefill: int = 4096, rows: int = 32, block_size: int = 64) -> OomBackoff:
    budgets = Budgets(max_batch_prefill_tokens=prefill, max_batch_size=rows, spare_slots=8)
    return OomBackoff(budgets, block_size=block_size)


def test_each_failure_halves_and_success_doubles_again() -> None:
    one = backoff()
    assert one.is_off
    assert one.shrink()
    assert one.shrink()
    assert (one.budgets.max_batch_prefill_tokens, one.budgets.max_batch_size) == (1024, 8)
    assert [one.succeeded() for _ in range(STEPS_BEFORE_RELIEF)].count(True) == 1
    assert (one.budgets.max_batch_prefill_tokens, one.budgets.max_batch_size) == (2048, 16)
    for _ in range(STEPS_BEFORE_RELIEF):
        one.succeeded()
    assert one.is_off
    assert not one.succeeded()


def test_a_failure_begins_the_count_of_successes_anew() -> None:
    one = backoff()
    one.shrink()
    for _ in range(STEPS_BEFORE_RELIEF - 1):
        assert not one.succeeded()
    one.shrink()
    assert not one.succeeded()


@given(st.integers(1, 10_000), st.integers(1, 512), st.integers(1, 128))
def test_it_ends_with_one_row_and_one_block_and_finds_back(
    prefill: int, rows: int, block_size: int
) -> None:
    one = backoff(prefill, rows, block_size)
    full, num_rises = one.budgets, 0
    while one.shrink():
        num_rises += 1
        assert num_rises < 20
    assert one.budgets.max_batch_size == 1
    assert one.budgets.max_batch_prefill_tokens == min(prefill, block_size)
    assert one.budgets.num_slots - one.budgets.max_batch_size == full.spare_slots
    while not one.is_off:
        one.succeeded()
    assert one.budgets == full
