"""A grammar that takes long rests while others want the CPUs, and goes on without rests while nobody does."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from millrace_shard.structured_output import slow_turns
from millrace_shard.structured_output.grammar_trial import Trial
from millrace_shard.structured_output.slow_turns import (
    MAX_SLOW,
    NUM_QUICK,
    QUICK_SECONDS,
    SlowTurns,
    TooManySlow,
)
from millrace_shard.structured_output.work_limit import WorkLimit

EACH = 0.1
"""Seconds of work in a run."""
REST = ["pause", "resume"]


class Noted(Trial):
    """Answers in its last run; notes what is done with it."""

    def __init__(self, num_runs: int) -> None:
        super().__init__(socket.socket())
        self.done: list[str] = []
        self._num_runs = num_runs

    @property
    def runs(self) -> int:
        return self.done.count("run")

    def limit(self, seconds: float) -> WorkLimit:
        return WorkLimit(seconds, lambda: EACH * self.runs, clock=lambda: 0.0)

    def pause(self) -> None:
        self.done.append("pause")

    def resume(self) -> None:
        self.done.append("resume")

    def is_answered(self, seconds: float) -> bool:
        if seconds:
            self.done.append("run")
        return self.runs >= self._num_runs


def work(trial: Noted, turns: SlowTurns, *busy: bool, seconds: float = 5.0) -> bool:
    """Busy in turn as given, and then no longer."""
    following: Iterator[bool] = iter(busy)
    return turns.work(trial, trial.limit(seconds), is_busy=lambda: next(following, False))


def test_it_rests_between_runs_while_others_are_busy() -> None:
    trial = Noted(8)
    assert work(trial, SlowTurns(), True, True, False, True)
    # The first is free. In the third, it has worked too long to go on without its turn.
    first = [*REST, "run", "run", *REST, "run", *REST]
    assert trial.done == [*first, *REST, "run", "run", *REST, "run", "run", "run"]
    trial.close()


def test_one_that_is_quick_has_no_rest_and_no_turn() -> None:
    trial, turns = Noted(1), SlowTurns()
    with turns._turn:
        assert work(trial, turns, True)
    assert trial.done == [*REST, "run"]
    trial.close()


def test_it_ends_at_its_limit() -> None:
    trial = Noted(100)
    assert not work(trial, SlowTurns(), True, True, True, seconds=0.5)
    assert trial.runs == 5
    trial.close()


class Late(Noted):
    """Its answer comes once nobody waits for it."""

    def is_answered(self, seconds: float) -> bool:
        super().is_answered(seconds)
        return not seconds and self.runs >= self._num_runs


def test_an_answer_that_came_with_the_limit_counts() -> None:
    trial = Late(5)
    assert work(trial, SlowTurns(), seconds=0.45)
    trial.close()


def test_nobody_waits_longer_than_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_turns, "PATIENCE_SECONDS", 0.05)
    turns = SlowTurns()
    trial = Noted(10**9)
    with turns._turn, pytest.raises(TooManySlow):
        work(trial, turns)
    assert not work(trial, turns, seconds=1e9)
    for _ in range(NUM_QUICK):
        assert turns._quick.acquire(blocking=False)
    with pytest.raises(TooManySlow):
        work(trial, turns)
    trial.close()


def test_every_place_is_given_back() -> None:
    turns = SlowTurns()
    for _ in range(2 * max(MAX_SLOW, NUM_QUICK)):
        trial = Noted(100)
        assert not work(trial, turns, seconds=2 * QUICK_SECONDS)
        trial.close()
    assert not turns._turn.locked()
