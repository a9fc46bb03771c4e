"""Adapters in the simulator: the router's residency under the virtual clock."""

from __future__ import annotations

import math
from random import Random

import pytest

from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.metrics import SimulationMetrics
from millrace.simulate.simulated_request import Arrival
from millrace.simulate.simulation import Simulation, simulate
from millrace.simulate.workload import Workload

COST = {
    "step": 0.01,
    "decode_row": 0.001,
    "decode_context_token": 0.0,
    "prefill_step": 0.005,
    "prefill_token": 0.0001,
    "prefill_pair": 0.0,
}


def deployment(**changes: object) -> Deployment:
    values = {
        "cost_model": COST,
        "num_blocks": 1001,
        "block_size": 4,
        "max_total_tokens": 1000,
        "adapter_load_seconds": 0.5,
        "adapter_memory_pages": 8,
    }
    return Deployment.model_validate(values | changes)


def run(
    arrivals: list[Arrival], *, fast_forward: bool = False, **changes: object
) -> SimulationMetrics:
    engine = Engine(deployment(**changes))
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
    metrics = run(arrivals)
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
    metrics = run(arrivals, fast_forward=fast_forward, max_active_adapters=3)
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
        return run(requests).cached_tokens

    assert cached("a", "b", "") == 0
    assert cached("a", "a") == cached("", "") == 80


def test_requests_are_refused_by_size_and_by_the_expected_wait() -> None:
    metrics = run(
        [
            Arrival(0.0, 10, 900, adapter="a"),
            Arrival(0.0, 10, 900, adapter="big", adapter_pages=9),
            Arrival(0.6, 10, 2, adapter="b", max_queue_seconds=1.0),
        ],
        max_active_adapters=1,
    )
    assert metrics.rejected == {"adapter too large": 1, "would wait too long": 1}
    assert metrics.finished == 1


def test_a_wait_for_an_adapter_ends_at_its_deadline() -> None:
    arrivals = [Arrival(0.0, 10, 2, adapter="a", max_queue_seconds=0.6), Arrival(0.3, 10, 2)]
    late = run(arrivals, adapter_load_seconds=0.5)
    assert late.finished == 2
    arrivals = [Arrival(number / 10, 10, 2, adapter=str(number)) for number in range(3)]
    arrivals = [a._replace(max_queue_seconds=5.8) for a in arrivals]
    expired = run(arrivals, max_active_adapters=1, adapter_load_seconds=2.5)
    assert expired.finished + sum(expired.rejected.values()) == 3


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
                deployment=deployment(fairness="adapter", adapter_load_seconds=0.01),
                workload=workload,
            )
        ]
    )
    assert metrics.finished == 400
    assert metrics.adapter_loads > 50
    assert "1" in metrics.first_token_of
