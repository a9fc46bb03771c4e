"""Steps taken together have the figures of steps taken one by one."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from bench.scale.fast_engine import FastEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.metrics import Distribution, SimulationMetrics
from millrace.simulate.simulated_request import Arrival

COST = {
    "step": 1.0,
    "decode_row": 0.07,
    "decode_context_token": 0.001,
    "prefill_step": 0.3,
    "prefill_token": 0.05,
    "prefill_pair": 0.0003,
}


@st.composite
def quiet_hours(draw: st.DrawFn) -> tuple[Deployment, list[Arrival]]:
    """Long answers, few at a time, and blocks that are enough or are not."""
    simulated = Deployment(
        cost_model=COST,
        block_size=4,
        num_blocks=draw(st.sampled_from([65, 80, 120, 1000])),
        max_total_tokens=256,
        max_input_tokens=32,
        max_batch_size=draw(st.sampled_from([2, 8])),
        max_batch_prefill_tokens=draw(st.sampled_from([32, 64])),
        fairness=draw(st.sampled_from(["none", "tenant"])),
        max_queue_wait=draw(st.sampled_from([None, None, 40.0])),
        steps_in_flight=draw(st.integers(1, 2)),
        late_planning=draw(st.sampled_from(["on", "off"])),
        step_ratios=tuple(draw(st.lists(st.floats(0.5, 2.0), max_size=5))),
        turn_seconds=draw(st.sampled_from([0.0, 0.01])),
    )
    now, arrivals = 0.0, []
    for _ in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, math.sqrt(2), 30 * math.sqrt(3)]))
        group = draw(st.sampled_from(["", "", "a"]))
        arrivals.append(
            Arrival(
                now,
                prompt_tokens=draw(st.integers(1, 32)),
                output_tokens=draw(st.integers(1, 150)),
                max_new_tokens=draw(st.sampled_from([None, 100, 150])),
                group=group,
                prefix_tokens=draw(st.integers(0, 50)) if group else 0,
                tenant=draw(st.sampled_from(["one", "other"])),
                max_queue_seconds=draw(st.sampled_from([None, None, None, 20.0])),
            )
        )
    return simulated, arrivals


@settings(max_examples=150, deadline=None)
@given(quiet_hours())
def test_steps_taken_together_are_as_those_taken_one_by_one(
    given_load: tuple[Deployment, list[Arrival]],
) -> None:
    simulated, arrivals = given_load
    together, single = FastEngine(simulated), Engine(simulated)
    for arrival in arrivals:
        together.run_until(arrival.arrived_at)
        while single.next_event < arrival.arrived_at:
            single.step()
        assert (together.arrive(arrival) is None) == (single.arrive(arrival) is None)
        assert together.metrics.steps == single.metrics.steps
    together.run_until(math.inf)
    while single.next_event < math.inf:
        single.step()
    for item in fields(SimulationMetrics):
        one, other = getattr(together.metrics, item.name), getattr(single.metrics, item.name)
        if isinstance(one, Distribution):
            one, other = (one.count, one.mean), (other.count, other.mean)
        if item.name != "first_token_of":
            assert one == pytest.approx(other), item.name
    first, second = together._planner.blocks, single._planner.blocks
    assert first.cache is not None
    assert second.cache is not None
    assert first.num_free == second.num_free
    assert list(first.cache._idle) == list(second.cache._idle)
