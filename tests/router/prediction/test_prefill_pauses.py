"""When decodes pause for prompts, on cases that are worked out by hand."""

from __future__ import annotations

from itertools import repeat

import pytest

from millrace_router.prediction.prefill_pauses import PausedBatch, PauseRule, Pauses

RULE = PauseRule(waiting_served_ratio=0.3, max_waiting_tokens=20)


def until_joined(num_ahead: int, ends: list[float], **changes: object) -> Pauses:
    """Ten may run, none arrives, and the last prefill has just been."""
    state: dict[str, object] = {
        "rule": RULE,
        "lengths": repeat(100.0),
        "num_free": 10 - len(ends),
        "most_joining": 10,
        "arrivals_per_decode": 0.0,
        "since": 1.0,
    }
    return PausedBatch(ends=ends, **(state | changes)).until_joined(num_ahead)  # type: ignore[arg-type]


def test_where_nothing_runs_all_join_at_once() -> None:
    assert until_joined(2, []) == Pauses(0, 0, 0, 0, 3)


def test_prompts_that_pause_nobody_follow_each_other() -> None:
    assert until_joined(7, [], most_joining=5) == Pauses(0, 0, 1, 5, 3)


def test_a_few_rows_pause_for_one() -> None:
    assert until_joined(0, [90.0] * 3) == Pauses(0, 0, 0, 0, 1)


def test_more_rows_pause_when_patience_is_spent() -> None:
    assert until_joined(0, [90.0] * 7) == Pauses(19, 7, 0, 0, 1)
    assert until_joined(0, [90.0] * 7, since=15.0) == Pauses(5, 7, 0, 0, 1)
    assert until_joined(0, [90.0] * 7, since=40.0) == Pauses(0, 0, 0, 0, 1)


def test_they_pause_when_enough_wait() -> None:
    assert until_joined(1, [90.0] * 7) == Pauses(0, 0, 0, 0, 2)
    # One in four decodes: the second one needed comes with the fourth.
    assert until_joined(0, [90.0] * 7, arrivals_per_decode=0.25) == Pauses(4, 7, 0, 0, 2)


def test_they_pause_when_so_many_have_left_that_those_who_wait_are_enough() -> None:
    assert until_joined(0, [6.0, 90.0, 90.0, 90.0, 90.0, 90.0, 90.0]) == Pauses(6, 7, 0, 0, 1)


def test_a_full_batch_pauses_when_enough_places_are_free() -> None:
    # After three decodes there is one place beside nine rows, after seven there are two beside eight: two are enough.
    mean_rows = (3 * 10 + 4 * 9) / 7
    found = until_joined(1, [3.0, 7.0, *[90.0] * 8])
    assert found == Pauses(7, pytest.approx(mean_rows), 0, 0, 2)  # type: ignore[arg-type]


def test_between_two_pauses_of_others_these_decode_once() -> None:
    assert until_joined(3, [90.0] * 4, most_joining=2) == Pauses(1, 6, 1, 2, 2)


def test_far_ahead_is_reckoned_at_the_rate_of_those_who_were_played() -> None:
    # Ten join at once, and each ten decode fifty times before the next ten.
    near, far = (until_joined(count, [], lengths=repeat(50.0)) for count in (100, 4000))
    assert (near.num_decodes, near.num_pauses) == (500, 10)
    assert (far.num_decodes, far.num_pauses) == (19950, 400)
