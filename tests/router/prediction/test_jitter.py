"""How steps of one load differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.prediction.cost import COEFFICIENTS, NUM_RATIOS, CostModel, StepJitter
from millrace_router.prediction.step_load import StepLoad


def test_nothing_is_said_of_few_steps() -> None:
    jitter = StepJitter()
    for _ in range(NUM_RATIOS - 1):
        jitter.add(1.0)
    assert jitter.ratios() == []


@given(st.lists(st.floats(0.01, 100.0), min_size=NUM_RATIOS, max_size=NUM_RATIOS + 50))
def test_ratios_are_those_of_the_last_steps_in_their_order_about_one(seen: list[float]) -> None:
    jitter = StepJitter()
    for ratio in seen:
        jitter.add(ratio)
    ratios, last = jitter.ratios(), seen[-NUM_RATIOS:]
    assert sum(ratios) / NUM_RATIOS == pytest.approx(1.0)
    assert ratios == pytest.approx([ratio * NUM_RATIOS / sum(last) for ratio in last])


def test_a_cost_model_sees_how_steps_of_one_load_differ() -> None:
    cost = CostModel()
    for number in range(600):
        cost.observe(StepLoad(decodes=4, context=400), 0.010 if number % 2 else 0.014)
    *_, slow, fast = cost.jitter.ratios()
    assert slow == pytest.approx(14 / 12, rel=0.02)
    assert fast == pytest.approx(10 / 12, rel=0.02)


def test_known_costs_learn_nothing_of_it() -> None:
    cost = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.001))
    for _ in range(600):
        cost.observe(StepLoad(decodes=4, context=400), 0.010)
    assert cost.jitter.ratios() == []
