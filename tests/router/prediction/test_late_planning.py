"""The time at which step n + 1 is planned while step n runs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.late_planning import LEAD_SECONDS, MOST, LatePlanning
from millrace_router.prediction.step_load import StepLoad

COST = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.0) | {"decode_row": 0.1})


def test_most_of_a_long_step_leaves_the_next_one_open() -> None:
    assert LatePlanning(COST).open_seconds(StepLoad(decodes=3)) == pytest.approx(MOST * 0.3)


def test_positions_that_may_be_left_empty_leave_nothing_open() -> None:
    costs = dict.fromkeys(COEFFICIENTS, 0.0) | {"decode_row": 0.1, "decode_context_token": 0.001}
    late = LatePlanning(CostModel.fixed({**costs, "extra_step": 5.0, "extra_position": 1.0}))
    plain = StepLoad(decodes=3, context=30)
    allowed = StepLoad(decodes=3, context=30 + 48 * 10, extra_positions=48)
    assert late.open_seconds(allowed) == pytest.approx(late.open_seconds(plain))


def test_the_lead_of_a_short_step_is_kept() -> None:
    late = LatePlanning(COST)
    assert late.open_part(0.020) == 0.020 - LEAD_SECONDS
    assert late.open_part(LEAD_SECONDS / 2) == 0.0


def test_nothing_stays_open_while_costs_are_unknown_or_it_is_turned_off() -> None:
    assert LatePlanning(CostModel()).open_seconds(StepLoad(decodes=1)) == 0.0
    assert LatePlanning(COST, most=0.0).open_seconds(StepLoad(decodes=1)) == 0.0


def test_a_step_that_came_too_late_makes_the_next_ones_come_earlier() -> None:
    late = LatePlanning(COST)
    for _ in range(8):
        late.learn(0.0)
    assert late.open_part(1.0) == late.share < MOST / 2
    for _ in range(500):
        late.learn(0.1)
    assert MOST - 0.001 < late.open_part(1.0) <= MOST


def test_a_step_that_was_planned_at_once_was_not_too_late() -> None:
    late = LatePlanning(COST)
    for _ in range(30):
        late.learn(0.0)
    low = late.open_part(1.0)
    late.learn(0.0, was_open=False)
    assert late.open_part(1.0) == low
    for _ in range(500):
        late.learn(0.1, was_open=False)
    assert late.open_part(1.0) > MOST - 0.001


VARIATIONS: dict[str, Callable[[random.Random], float]] = {
    "none": lambda _: 1.0,
    "a little": lambda rng: rng.uniform(0.9, 1.1),
    "much": lambda rng: rng.lognormvariate(0.0, 0.4),
    "now and then": lambda rng: 0.5 if rng.random() < 0.1 else 1.0,
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_few_steps_come_too_late_however_much_they_vary(name: str) -> None:
    late, rng, num_late = LatePlanning(COST), random.Random(1), 0
    for _ in range(2000):
        spare = VARIATIONS[name](rng) - late.open_part(1.0)
        num_late += spare <= 0.0
        late.learn(max(0.0, spare))
    assert num_late <= 0.08 * 2000
    assert late.open_part(1.0) > 0.2


@given(st.lists(st.floats(0.0, 1.0)), st.floats(0.0, 100.0))
def test_it_stays_within_its_bounds(spares: list[float], seconds: float) -> None:
    late = LatePlanning(COST)
    for spare in spares:
        late.learn(spare)
    assert 0.0 <= late.open_part(seconds) <= max(0.0, min(MOST * seconds, seconds - LEAD_SECONDS))
