"""The breaker bounds restarts without progress, allows more for a search, and resets after progress."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_launcher.supervision.restarts import Breaker, delay_seconds, is_steady


def restarts_until_no(breaker: Breaker) -> list[float]:
    delays = []
    while (delay := breaker.restart()) is not None:
        delays.append(delay)
    return delays


def test_first_restart_comes_at_once_and_the_next_ones_after_longer_and_longer() -> None:
    assert restarts_until_no(Breaker(10)) == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@given(st.integers(1, 10**9))
def test_delays_never_shrink_and_never_exceed_30_s(restarts: int) -> None:
    assert delay_seconds(restarts) <= delay_seconds(restarts + 1) <= 30


@given(st.integers(0, 20), st.lists(st.integers(-5, 10**6), max_size=6))
def test_a_search_has_its_own_restarts_and_no_more(max_restarts: int, suspects: list[int]) -> None:
    breaker = Breaker(max_restarts)
    for count in suspects:
        breaker.suspect(count)
    most = max(suspects, default=0)
    own = 2 * math.ceil(math.log2(most)) + 4 if most > 0 else 0
    delays = restarts_until_no(breaker)
    assert len(delays) == own + max_restarts
    assert delays[:own] == [0.0] * own


@given(st.integers(1, 512))
def test_a_narrowing_search_is_bounded_by_its_widest(count: int) -> None:
    breaker = Breaker(0)
    restarts = 0
    narrowed = count
    while True:
        breaker.suspect(narrowed)
        if breaker.restart() is None:
            break
        restarts += 1
        narrowed = max(1, narrowed // 2)
    assert restarts == 2 * math.ceil(math.log2(count)) + 4


Move = st.one_of(
    st.sampled_from(["progress", "restart"]), st.integers(0, 100).map(lambda n: ("suspect", n))
)


@given(st.integers(0, 5), st.lists(Move, max_size=60))
def test_only_what_came_after_the_last_progress_counts(
    max_restarts: int, moves: list[str | tuple[str, int]]
) -> None:
    """The oracle: a new breaker that gets only the events since then."""
    breaker = Breaker(max_restarts)
    since: list[str | tuple[str, int]] = []

    def play(one: Breaker, move: str | tuple[str, int]) -> float | None:
        if move == "restart":
            return one.restart()
        if isinstance(move, tuple):
            one.suspect(move[1])
        return None

    for move in moves:
        if move == "progress":
            breaker.progressed()
            since.clear()
            continue
        fresh = Breaker(max_restarts)
        for earlier in since:
            play(fresh, earlier)
        since.append(move)
        assert play(breaker, move) == play(fresh, move)


def test_death_before_readiness_is_no_part_of_a_search() -> None:
    breaker = Breaker(2)
    breaker.suspect(2)
    assert [breaker.restart(was_ready=False) for _ in range(3)] == [0, 0.5, None]
    assert [breaker.restart() for _ in range(7)] == [0] * 6 + [None]


@pytest.mark.parametrize(("count", "own"), [(1, 4), (2, 6), (3, 8), (50, 16), (64, 16)])
def test_allowance_of_a_search(count: int, own: int) -> None:
    breaker = Breaker(0)
    breaker.suspect(count)
    assert len(restarts_until_no(breaker)) == own


@pytest.mark.parametrize(
    ("ready_at", "now", "steady"),
    [(None, 100.0, False), (90.1, 100.0, False), (90.0, 100.0, True), (0.0, 5.0, False)],
)
def test_who_served_long_enough_is_steady(ready_at: float | None, now: float, steady: bool) -> None:
    assert is_steady(ready_at, now, enough_seconds=10) is steady
