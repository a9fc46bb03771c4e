"""A step that hangs against one that is slow."""

from __future__ import annotations

import pytest

from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.recovery.hang_detector import SLOWEST, StepTimer

LOAD = StepLoad(decodes=1, context=10)


def ticks_until_hung(timer: StepTimer, step: object, load: StepLoad = LOAD) -> int:
    for number in range(1, 100_000):
        if timer.is_hung(step, load, timer.tick_seconds):
            return number
    raise AssertionError("never")


def test_a_step_gets_the_floor_while_nothing_is_known_of_its_cost() -> None:
    timer = StepTimer(30.0, CostModel())
    assert ticks_until_hung(timer, object()) == pytest.approx(30 / timer.tick_seconds, abs=3)


def test_a_step_that_is_predicted_to_be_long_gets_a_multiple_of_that() -> None:
    cost = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.0) | {"step": 2.0})
    timer = StepTimer(30.0, cost)
    assert timer.limit_seconds(LOAD) == pytest.approx(SLOWEST * 2.0)
    expected = SLOWEST * 2.0 / timer.tick_seconds
    assert ticks_until_hung(timer, object()) == pytest.approx(expected, abs=3)


def test_every_step_has_its_own_time() -> None:
    timer = StepTimer(30.0, CostModel())
    for _ in range(1000):
        step = object()
        for _ in range(10):
            assert not timer.is_hung(step, LOAD, 1.0)


def test_a_router_that_was_stopped_does_not_take_that_for_a_hang() -> None:
    timer, step = StepTimer(30.0, CostModel()), object()
    timer.is_hung(step, LOAD, 0.5)
    assert not timer.is_hung(step, LOAD, 3600.0)
    assert not timer.is_hung(step, LOAD, 0.5)
