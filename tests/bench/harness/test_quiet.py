"""Waiting for a quiet machine, on a clock and a load of the test's own."""

from __future__ import annotations

from collections.abc import Iterable

from bench.harness.quiet import Quiet, wait_until_quiet

QUIET = Quiet(idle_seconds=2.0, patience_seconds=10.0)


class FakeMachine:
    """Others use what the list says, one entry for each look."""

    def __init__(self, loads: Iterable[float]) -> None:
        self.now = 0.0
        self._loads = iter(loads)

    def measure(self, seconds: float) -> float:
        self.now += seconds
        return next(self._loads)

    def clock(self) -> float:
        return self.now


def test_it_waits_for_the_first_quiet_stretch() -> None:
    machine = FakeMachine([1.3, 0.1, 0.02, 0.9])
    assert wait_until_quiet(QUIET, measure=machine.measure, clock=machine.clock)
    assert machine.now == 6.0


def test_the_wait_is_limited() -> None:
    machine = FakeMachine([0.5] * 100)
    assert not wait_until_quiet(QUIET, measure=machine.measure, clock=machine.clock)
    assert machine.now == 10.0


def test_without_a_wait_it_measures_once() -> None:
    machine = FakeMachine([0.5] * 2)
    quiet = Quiet(patience_seconds=0.0)
    assert not wait_until_quiet(quiet, measure=machine.measure, clock=machine.clock)
    assert machine.now == quiet.idle_seconds
