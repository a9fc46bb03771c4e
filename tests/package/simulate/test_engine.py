"""The clock of the simulator, on cases that are computed by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.metrics import SimulationMetrics
from millrace.simulate.simulated_request import Arrival, PrefixNames, SimulatedRequest
from millrace.simulate.simulation import Simulation, simulate
from millrace.simulate.workload import Workload
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.step_plan import StepPlan
from millrace_testing.schedules.client import expected_end
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.slow_engine import SlowEngine

COST = {
    "step": 1.0,
    "decode_row": 0.1,
    "decode_context_token": 0.0,
    "prefill_step": 0.5,
    "prefill_token": 0.01,
    "prefill_pair": 0.0,
}
DECODE = 1.1
"""Seconds of a step that decodes one row."""


def deployment(**changes: object) -> Deployment:
    values = {"cost_model": COST, "num_blocks": 1001, "block_size": 4, "max_total_tokens": 1000}
    return Deployment.model_validate(values | changes)


def run(arrivals: list[Arrival], **changes: object) -> SimulationMetrics:
    engine = Engine(deployment(**changes))
    for arrival in arrivals:
        while engine.next_event < arrival.arrived_at:
            engine.step()
        engine.arrive(arrival)
    while engine.next_event < math.inf:
        engine.step()
    return engine.metrics


def test_a_single_request_pays_for_its_prefill_and_then_for_each_decode() -> None:
    metrics = run([Arrival(7.0, 100, 5)])
    first = 1.0 + 0.5 + 100 * 0.01
    assert metrics.queue.percentile(50) == 0.0
    assert metrics.first_token.percentile(50) == pytest.approx(first)
    assert metrics.between_tokens.count == 4
    assert metrics.between_tokens.percentile(1) == pytest.approx(DECODE)
    assert metrics.between_tokens.percentile(100) == pytest.approx(DECODE)
    assert metrics.latency.percentile(50) == pytest.approx(first + 4 * DECODE)
    assert metrics.started_at == 7.0
    assert metrics.ended_at == pytest.approx(7.0 + first + 4 * DECODE)
    assert (metrics.output_tokens, metrics.prefill_tokens) == (5, 100)


def test_the_end_is_known_one_step_late_unless_the_limit_determines_it() -> None:
    surprised = run([Arrival(0.0, 100, 5)])
    announced = run([Arrival(0.0, 100, 5, max_new_tokens=5)])
    one_at_a_time = run([Arrival(0.0, 100, 5)], steps_in_flight=1)
    assert announced.busy_seconds == pytest.approx(2.5 + 4 * DECODE)
    assert surprised.busy_seconds == pytest.approx(2.5 + 5 * DECODE)
    assert one_at_a_time.busy_seconds == pytest.approx(2.5 + 4 * DECODE)
    assert surprised.latency.mean == announced.latency.mean == one_at_a_time.latency.mean
    assert surprised.between_tokens.count == 4


def test_tiles_come_before_a_prompt_and_in_turn_with_the_steps_of_others() -> None:
    cost = {**COST, "tile": 3.0}
    alone = run([Arrival(0.0, 100, 5, tiles=2, tile_tokens=10)], cost_model=cost)
    assert alone.first_token.percentile(50) == pytest.approx(2 * 3.0 + 1.5 + 100 * 0.01)
    arrivals = [Arrival(0.0, 10, 30), Arrival(5.0, 50, 1, tiles=4, tile_tokens=10)]
    beside = run(arrivals, cost_model=cost)
    # No step of the first one waits for more than a tile.
    assert beside.between_tokens.percentile(100) <= 3.0 + 1.5 + 50 * 0.01 + DECODE
    assert beside.first_token.percentile(100) >= 4 * 3.0
    assert run(arrivals[:1], cost_model=cost).latency.mean == run(arrivals[:1]).latency.mean


def test_a_prompt_that_comes_early_in_a_step_is_in_the_next_one() -> None:
    # At 0 a prefill (until 2.5) is sent, at 2.25 the step with a decode and the prompt (2.5 + 0.1 long).
    metrics = run([Arrival(0.0, 100, 10), Arrival(0.1, 100, 1)])
    assert metrics.queue.percentile(100) == pytest.approx(2.25 - 0.1)
    assert metrics.first_token.percentile(100) == pytest.approx(2.5 + 2.6 - 0.1)
    # At 2.25 a decode (2.5 until 3.6) is sent, at 3.49 the step with both.
    metrics = run([Arrival(0.0, 100, 10), Arrival(2.3, 100, 1)])
    assert metrics.queue.percentile(100) == pytest.approx(2.5 + 0.9 * DECODE - 2.3)
    assert metrics.first_token.percentile(100) == pytest.approx(3.6 + 2.6 - 2.3)
    # A server that has learned to plan earlier is simulated so.
    metrics = run([Arrival(0.0, 100, 10), Arrival(2.3, 100, 1)], late_planning_share=0.5)
    assert metrics.queue.percentile(100) == pytest.approx(2.5 + 0.5 * DECODE - 2.3)


def test_a_computed_prefix_is_a_hit_for_the_next_request_of_the_group() -> None:
    arrivals = [Arrival(float(100 * n), 50, 2, group="g", prefix_tokens=40) for n in range(3)]
    metrics = run(arrivals)
    assert (metrics.cached_tokens, metrics.prefill_tokens) == (80, 150 - 80)
    assert metrics.first_token.percentile(100) == pytest.approx(1.5 + 50 * 0.01)
    assert metrics.first_token.percentile(50) == pytest.approx(1.5 + 10 * 0.01)
    assert run(arrivals, prefix_caching="off").cached_tokens == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_concurrent_requests": 2}, "overloaded"),
        ({"max_queue_size": 2}, "queue full"),
        ({"max_input_tokens": 9}, "too long"),
    ],
)
def test_refusals_are_counted_by_their_reason(changes: dict[str, int], reason: str) -> None:
    metrics = run([Arrival(0.0, 10, 5) for _ in range(3)], **changes)
    number = 3 if reason == "too long" else 1
    assert metrics.rejected == {reason: number}
    assert metrics.finished == 3 - number


def test_an_answer_that_cannot_fit_is_refused_and_one_that_need_not_is_cut() -> None:
    metrics = run([Arrival(0.0, 950, 100, max_new_tokens=100), Arrival(0.0, 950, 100)])
    assert metrics.rejected == {"too long": 1}
    assert metrics.output_tokens == 50


def test_a_request_that_would_wait_past_its_limit_is_refused_at_once() -> None:
    arrivals = [Arrival(0.0, 10, 50), Arrival(0.1, 10, 5, max_queue_seconds=5.0)]
    metrics = run(arrivals, max_batch_size=1)
    assert metrics.rejected == {"would wait too long": 1}
    assert run(arrivals).finished == 2
    assert run(arrivals, max_batch_size=1, max_queue_wait=5.0).rejected == metrics.rejected


def test_a_request_that_has_waited_past_its_limit_leaves() -> None:
    short = [Arrival(10.0 * n, 10, 1, max_queue_seconds=900.0) for n in range(50)]
    # All answers were short, so the wait for this one is thought to be short as well.
    long, impatient = Arrival(900.0, 10, 50), Arrival(900.1, 10, 1, max_queue_seconds=20.0)
    metrics = run([*short, long, impatient], max_batch_size=1)
    assert metrics.rejected == {"waited too long": 1}
    assert metrics.finished == 51


COST_135M = {
    "step": 0.008,
    "decode_row": 0.00032,
    "decode_context_token": 4e-7,
    "prefill_step": 0.005,
    "prefill_token": 0.000085,
    "prefill_pair": 4e-8,
}
"""About what steps of the 135M shape cost on two cores of Zen 5."""


@pytest.mark.parametrize(("clients", "most"), [(8, 0.038), (32, 0.0718)])
def test_prompts_that_arrive_together_do_not_stall_streams(clients: int, most: float) -> None:
    """The limits are vLLM's p99 on that machine; a target of a second gives steps as long as a pause may be."""

    lengths = {"prompt_tokens": "128", "output_tokens": "64"}
    load = lengths | {"think_seconds": 0.003, "ramp_seconds": 0.02}

    def served(**changes: float) -> SimulationMetrics:
        flags = {"cost_model": COST_135M, "block_size": 16, "max_batch_prefill_tokens": 4096}
        workload = Workload.model_validate(load | {"clients": clients, "requests": 8 * clients})
        simulation = Simulation(deployment=deployment(**flags, **changes), workload=workload)
        (metrics,) = simulate([simulation])
        return metrics

    metrics, whole = served(), served(target_inter_token_latency=1000.0)
    assert metrics.between_tokens.percentile(99) <= most
    assert whole.between_tokens.percentile(100) > 2 * most
    assert metrics.between_tokens.percentile(50) == pytest.approx(
        whole.between_tokens.percentile(50), rel=0.02
    )
    assert metrics.first_token.percentile(50) < whole.first_token.percentile(50)
    assert metrics.ended_at < 1.07 * whole.ended_at


BLOCK_SIZE = 4
MAX_TOTAL = 48
REFERENCE_COST = {
    "step": 1.0,
    "decode_row": 0.07,
    "decode_context_token": 0.001,
    "prefill_step": 0.3,
    "prefill_token": 0.05,
    "prefill_pair": 0.0003,
}


def reference_deployment(**changes: object) -> Deployment:
    values = {"cost_model": REFERENCE_COST, "block_size": BLOCK_SIZE, "max_total_tokens": MAX_TOTAL}
    return Deployment.model_validate(values | changes)


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    return reference_deployment(
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


def run_reference(engine: Engine, arrivals: list[Arrival]) -> None:
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
    reference_deployment(num_blocks=15, **ONE_STEP_AT_A_TIME),
    at_once((23, 10), (1, 9), (1, 1), (1, 1), (19, 2)),
)
EVICTED_BY_ORDER_OF_END = (
    reference_deployment(num_blocks=28, kv_reservation="full", **ONE_STEP_AT_A_TIME),
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
    run_reference(engine, arrivals)
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
    run_reference(engine, arrivals)
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
        reference_deployment(
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


def request(
    request_id: int, prefixes: PrefixNames, *, group: str = "", prefix_tokens: int = 0
) -> SimulatedRequest:
    return SimulatedRequest(
        request_id,
        Arrival(0.0, 100, 10, group=group, prefix_tokens=prefix_tokens),
        max_new_tokens=50,
        block_size=16,
        prefixes=prefixes,
    )


@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_blocks_of_a_chain_are_equal_where_all_their_parts_are(block_size: int) -> None:
    def keys(chain: tuple[int, ...], number: int) -> list[bytes]:
        arrival = Arrival(0.0, 1500, 100, chain=chain, chain_tokens=512)
        request = SimulatedRequest(
            number, arrival, max_new_tokens=100, block_size=block_size, prefixes=PrefixNames()
        )
        return list(request.block_keys(1600 // block_size))

    one, other = keys((0, 1, 2), 1), keys((0, 1, 3), 2)
    equal = [a == b for a, b in zip(one, other, strict=True)]
    assert equal == [(place + 1) * block_size <= 1024 for place in range(len(one))]
    again = keys((0, 1, 2), 3)
    equal = [a == b for a, b in zip(one, again, strict=True)]
    assert equal == [(place + 1) * block_size <= 1500 for place in range(len(one))]
    assert len(set(one)) == len(one)


ADAPTER_COST = {
    "step": 0.01,
    "decode_row": 0.001,
    "decode_context_token": 0.0,
    "prefill_step": 0.005,
    "prefill_token": 0.0001,
    "prefill_pair": 0.0,
}


def adapter_deployment(**changes: object) -> Deployment:
    values = {
        "cost_model": ADAPTER_COST,
        "num_blocks": 1001,
        "block_size": 4,
        "max_total_tokens": 1000,
        "adapter_load_seconds": 0.5,
        "adapter_memory_pages": 8,
    }
    return Deployment.model_validate(values | changes)


def run_adapters(
    arrivals: list[Arrival], *, fast_forward: bool = False, **changes: object
) -> SimulationMetrics:
    engine = Engine(adapter_deployment(**changes))
    for arrival in arrivals:
        if fast_forward:
            engine.run_until(arrival.arrived_at)
        while engine.next_event < arrival.arrived_at:
            engine.step()
        engine.arrive(arrival)
    if fast_forward:
        engine.run_until(math.inf)
    while engine.next_event < math.inf:
        engine.step()
    return engine.metrics


def test_a_request_waits_for_the_load_of_its_adapter_and_the_next_one_does_not() -> None:
    arrivals = [
        Arrival(0.0, 10, 3, adapter="a"),
        Arrival(0.1, 10, 3),
        Arrival(5.0, 10, 3, adapter="a"),
    ]
    metrics = run_adapters(arrivals)
    assert metrics.finished == 3
    assert metrics.adapter_loads == 1
    assert metrics.queue.percentile(100) == pytest.approx(0.5)
    assert metrics.queue.percentile(60) < 0.1


@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_waits_are_bounded_with_many_adapters_and_endless_answers(
    seed: int, *, fast_forward: bool
) -> None:
    random = Random(seed)
    arrivals, now = [], 0.0
    for _ in range(60):
        now += random.expovariate(4.0)
        name = random.choice(["", *"abcdefghijkl"])
        answer = random.choice((1, 20, 900))
        arrivals.append(Arrival(now, 20, answer, adapter=name, adapter_pages=random.randint(0, 8)))
    metrics = run_adapters(arrivals, fast_forward=fast_forward, max_active_adapters=3)
    assert metrics.finished == 60
    # At most 12 versions wait, each for a turn: two cycles, three loads, and a few steps.
    assert metrics.queue.percentile(100) < 12 * (2 * 2.0 + 3 * 0.5 + 0.5)
    assert metrics.adapter_loads >= 12
    if seed == 0:
        assert metrics.preemptions > 0


def test_an_adapter_shares_no_prefix_with_the_base_or_with_another() -> None:
    def cached(*names: str) -> int:
        requests = [
            Arrival(10.0 * number, 100, 2, group="g", prefix_tokens=80, adapter=name)
            for number, name in enumerate(names)
        ]
        return run_adapters(requests).cached_tokens

    assert cached("a", "b", "") == 0
    assert cached("a", "a") == cached("", "") == 80


def test_requests_are_refused_by_size_and_by_the_expected_wait() -> None:
    metrics = run_adapters(
        [
            Arrival(0.0, 10, 900, adapter="a"),
            Arrival(0.0, 10, 900, adapter="big", adapter_pages=9),
            Arrival(0.6, 10, 2, adapter="b", max_queue_seconds=1.0),
        ],
        max_active_adapters=1,
    )
    assert metrics.rejected == {"adapter too large": 1, "would wait too long": 1}
    assert metrics.finished == 1


def test_a_workload_draws_adapters_by_zipf() -> None:
    workload = Workload.model_validate(
        {"rate": 10.0, "requests": 400, "output_tokens": "4", "adapters": 50, "adapter_pages": 1}
    )
    names = [arrival.adapter for arrival in workload.arrivals()]
    assert names.count("1") > 2 * names.count("3") > 0
    assert len(set(names)) > 30
    (metrics,) = simulate(
        [
            Simulation(
                deployment=adapter_deployment(fairness="adapter", adapter_load_seconds=0.01),
                workload=workload,
            )
        ]
    )
    assert metrics.finished == 400
    assert metrics.adapter_loads > 50
    assert "1" in metrics.first_token_of
