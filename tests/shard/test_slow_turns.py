"""A grammar that takes long rests while others want the CPUs, and goes on without rests while nobody does."""

from __future__ import annotations

import socket

from millrace_shard.grammar_trial import Trial
from millrace_shard.slow_turns import SlowTurns
from millrace_shard.work_limit import WorkLimit


class Noted(Trial):
    """Answers the fourth time it is asked; notes what is done with it."""

    def __init__(self) -> None:
        super().__init__(socket.socket())
        self.done: list[str] = []

    def pause(self) -> None:
        self.done.append("pause")

    def resume(self) -> None:
        self.done.append("resume")

    def is_answered(self, seconds: float) -> bool:
        self.done.append("run")
        return self.done.count("run") == 4


def test_it_rests_between_runs_while_others_are_busy() -> None:
    trial, busy = Noted(), iter([True, False, True])
    limit = WorkLimit(1.0, lambda: 0.0, clock=lambda: 0.0)
    assert SlowTurns().work(trial, limit, is_busy=lambda: next(busy))
    run, rest = ["run"], ["pause", "resume"]
    assert trial.done == [*rest, *run, *rest, *run, *run, *rest, *run]
    trial.close()


def test_it_ends_at_its_limit_while_others_are_busy() -> None:
    trial, used = Noted(), iter([0.0, 0.5, 1.0])
    limit = WorkLimit(1.0, lambda: next(used), clock=lambda: 0.0)
    assert not SlowTurns().work(trial, limit, is_busy=lambda: True)
    assert trial.done.count("run") == 1
    trial.close()
