"""The simulator against a slow one that delivers every token, and against the scheduler with a shard."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.simulated_request import Arrival
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.step_plan import StepPlan
from millrace_testing.schedules.client import expected_end
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.slow_engine import SlowEngine

BLOCK_SIZE = 4
MAX_TOTAL = 48
COST = {
    "step": 1.0,
    "decode_row": 0.07,
    "decode_context_token": 0.001,
    "prefill_step": 0.3,
    "prefill_token": 0.05,
    "prefill_pair": 0.0003,
}


def deployment(**changes: object) -> Deployment:
    values = {"cost_model": COST, "block_size": BLOCK_SIZE, "max_total_tokens": MAX_TOTAL}
    return Deployment.model_validate(values | changes)


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    return deployment(
        num_blocks=draw(st.integers(MAX_TOTAL // BLOCK_SIZE + 1, 40)),
        max_input_tokens=24,
        max_batch_size=draw(st.integers(1, 8)),
        max_batch_prefill_tokens=draw(st.integers(1, 60)),
        kv_reservation=draw(st.sampled_from(["grow", "full"])),
        prefix_caching=draw(st.sampled_from(["on", "off"])),
        prefill_order=draw(st.sampled_from(["shortest", "arrival"])),
        target_inter_token_latency=draw(st.sampled_from([None, 1500.0])),
        steps_in_flight=draw(st.integers(1, 2)),
        late_planning=draw(st.sampled_from(["on", "off"])),
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    now, arrivals = 0.0, []
    for _ in range(draw(st.integers(1, 25))):
        # Never at the exact time of an answer: the order of the two events is undefined.
        now += draw(st.sampled_from([0.0, 0.0, math.sqrt(2), 7 * math.sqrt(3)]))
        group = draw(st.sampled_from(["", "a", "b"]))
        arrivals.append(
            Arrival(
                now,
                prompt_tokens=draw(st.integers(1, 24)),
                output_tokens=draw(st.integers(1, 40)),
                max_new_tokens=draw(st.one_of(st.none(), st.integers(1, 24))),
                group=group,
                prefix_tokens=draw(st.integers(0, 30)) if group else 0,
            )
        )
    return arrivals


def run(engine: Engine, arrivals: list[Arrival]) -> None:
    for arrival in arrivals:
        engine.run_until(arrival.arrived_at)
        assert engine.arrive(arrival)
    engine.run_until(math.inf)


def at_once(*lengths: tuple[int, int]) -> list[Arrival]:
    return [Arrival(0.0, prompt_tokens, output_tokens) for prompt_tokens, output_tokens in lengths]


ONE_STEP_AT_A_TIME = {
    "max_input_tokens": 24,
    "max_batch_size": 3,
    "max_batch_prefill_tokens": 24,
    "steps_in_flight": 1,
}
PREEMPTED_BESIDE_PROMPTS = (
    deployment(num_blocks=15, **ONE_STEP_AT_A_TIME),
    at_once((23, 10), (1, 9), (1, 1), (1, 1), (19, 2)),
)
EVICTED_BY_ORDER_OF_END = (
    deployment(num_blocks=28, kv_reservation="full", **ONE_STEP_AT_A_TIME),
    [
        *at_once((1, 1), (1, 6), (1, 5)),
        Arrival(0.0, 1, 1, max_new_tokens=1),
        *at_once((1, 26), (1, 37), (1, 9)),
        Arrival(0.0, 1, 1, max_new_tokens=1),
        *at_once((1, 12), (15, 18), (19, 26)),
        Arrival(0.0, 1, 11, max_new_tokens=11, group="a", prefix_tokens=4),
        *at_once((9, 16), (1, 1), (1, 1)),
        Arrival(0.0, 5, 1, group="a", prefix_tokens=4),
    ],
)


@settings(max_examples=100, deadline=None)
@given(deployments(), workloads())
@example(*PREEMPTED_BESIDE_PROMPTS)
@example(*EVICTED_BY_ORDER_OF_END)
def test_every_figure_equals_that_of_delivering_each_token(
    simulated: Deployment, arrivals: list[Arrival]
) -> None:
    slow, engine = SlowEngine(simulated), Engine(simulated)
    slow.run(arrivals)
    run(engine, arrivals)
    metrics, times = engine.metrics, [c.token_times for c in slow.requests]
    assert metrics.finished == len(arrivals)
    assert all(request.has_ended for request in slow.requests)
    assert metrics.output_tokens == sum(map(len, times))
    assert metrics.steps == len(slow.plans)
    assert metrics.preemptions == sum(c.num_preemptions for c in slow.requests)
    assert metrics.prefill_tokens == sum(plan.load.prefill_tokens for plan in slow.plans)
    assert metrics.busy_seconds == pytest.approx(slow.busy_seconds)
    expected = {
        "queue": [(c.admitted_at or 0.0) - c.queued_at for c in slow.requests],
        "first_token": [c.token_times[0] - c.queued_at for c in slow.requests],
        "latency": [c.token_times[-1] - c.queued_at for c in slow.requests],
        "between_tokens": [later - one for row in times for one, later in pairwise(row)],
    }
    for name, values in expected.items():
        distribution = getattr(metrics, name)
        assert distribution.count == len(values), name
        assert distribution.mean * len(values) == pytest.approx(sum(values)), name
        for percent in (1, 50, 100):
            exact = (
                sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else 0
            )
            assert distribution.percentile(percent) == pytest.approx(exact, rel=0.011, abs=1e-9), (
                name
            )


@settings(max_examples=50, deadline=None)
@given(deployments(), workloads())
def test_nothing_is_left_over(simulated: Deployment, arrivals: list[Arrival]) -> None:
    engine = Engine(simulated)
    run(engine, arrivals)
    planner = engine._planner
    assert not planner.running
    assert planner.num_paused == len(engine._waiting) == 0
    assert planner.blocks.num_reserved == 0
    assert planner.blocks.num_free + planner.blocks.num_cached == planner.blocks.num_blocks
    assert not engine._may_end or min(engine._may_end) > engine._pipeline.last_sent


def compositions(plans: list[StepPlan]) -> list[tuple[object, ...]]:
    """The content of each step by requests, without slots and blocks."""
    owners: dict[int, int] = {}
    result: list[tuple[object, ...]] = []
    for plan in plans:
        dropped = sorted(owners[slot] for slot in plan.dropped)
        owners |= {row.slot: row.entry.request_id for row in plan.admitted}
        result.append(
            (
                dropped,
                [(row.entry.request_id, row.num_cached) for row in plan.admitted],
                sorted(owners[slot] for slot, _ in plan.grown),
                [(owners[slot], num_tokens) for slot, num_tokens in plan.chunks],
                sorted(owners[slot] for slot in plan.decodes),
                plan.num_preempted,
            )
        )
    return result


class Recorded:
    """The plans of an engine's planner."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[StepPlan] = []
        plan_next = engine._planner.plan

        def plan(*args: Any, **options: Any) -> StepPlan | None:
            result = plan_next(*args, **options)
            if result is not None:
                self.plans.append(result)
            return result

        monkeypatch.setattr(engine._planner, "plan", plan)


@pytest.mark.parametrize("reservation", ["grow", "full"])
@pytest.mark.parametrize("num_blocks", [20, 200])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_steps_are_those_of_the_router_with_a_shard(
    reservation: str, num_blocks: int, steps_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(
        deployment(
            num_blocks=num_blocks,
            max_batch_size=6,
            max_batch_prefill_tokens=16,
            kv_reservation=reservation,
            steps_in_flight=steps_in_flight,
            late_planning="off",
        )
    )
    recorded = Recorded(engine, monkeypatch)
    budgets = engine._planner.budgets
    shard = HashShard(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_batch_size=budgets.num_slots,
        eos_every=20,
    )
    driver = ScheduleDriver(budgets, shard, depth=steps_in_flight, cost=engine._cost)
    for number in range(40):
        group, prefix_tokens = ("a", 9) if number % 3 else ("", 0)
        own = [60 + number % 30, number // 30, *range(number % 7)]
        request = ValidRequest(
            input_ids=(*range(1, 1 + prefix_tokens), *own),
            max_new_tokens=MAX_TOTAL - prefix_tokens - len(own),
        )
        tokens, _ = expected_end(request, eos_every=20)
        driver.submit(request)
        engine.arrive(
            Arrival(
                engine.now,
                len(request.input_ids),
                len(tokens),
                group=group,
                prefix_tokens=prefix_tokens,
            )
        )
        for _ in range(number % 4):
            driver.turn()
            engine.step()
    driver.run()
    while engine.next_event < math.inf:
        engine.step()
    driver.check_idle()
    assert compositions(recorded.plans) == compositions(driver.plans)
    assert engine.metrics.finished == 40
    assert (engine.metrics.preemptions > 0) == (reservation == "grow" and num_blocks == 20)
