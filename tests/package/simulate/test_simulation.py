"""A server's share of a workload: open loops, clients that wait, groups and tenants."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.simulate.deployment import Deployment
from millrace.simulate.metrics import SimulationMetrics
from millrace.simulate.report import FIGURES
from millrace.simulate.simulation import Simulation, simulate
from millrace.simulate.workload import Workload

DEPLOYMENT = Deployment(
    cost_model={
        "step": 0.01,
        "decode_row": 0.0002,
        "decode_context_token": 1e-7,
        "prefill_step": 0.0,
        "prefill_token": 1e-4,
        "prefill_pair": 0.0,
    },
    num_blocks=500,
    block_size=16,
    max_total_tokens=2048,
)


def simulation(*, replicas: int = 1, **workload: Any) -> Simulation:
    values = {"requests": 200, "output_tokens": "uniform:1:60", "prompt_tokens": "uniform:1:300"}
    return Simulation(
        deployment=DEPLOYMENT,
        workload=Workload.model_validate(values | workload),
        replicas=replicas,
    )


def figures(metrics: SimulationMetrics) -> dict[str, float]:
    return {figure.name: figure.of(metrics) for figure in FIGURES}


def test_a_run_can_be_repeated() -> None:
    one, again = simulate([simulation(rate=20.0), simulation(rate=20.0)])
    assert figures(one) == figures(again)


def test_clients_wait_for_their_answers() -> None:
    (metrics,) = simulate([simulation(clients=4, requests=40)])
    assert metrics.finished == 40
    assert metrics.row_seconds / metrics.busy_seconds <= 4.0
    (alone,) = simulate([simulation(clients=1, requests=40)])
    assert alone.row_seconds / alone.busy_seconds == pytest.approx(1.0)
    assert alone.ended_at == pytest.approx(alone.latency.mean * 40)


def test_clients_think_between_requests() -> None:
    (metrics,) = simulate([simulation(clients=1, requests=5, think_seconds=100.0)])
    assert metrics.ended_at == pytest.approx(400.0 + metrics.latency.mean * 5)


def test_a_group_shares_its_prefill() -> None:
    shared, alone = simulate(
        [
            simulation(rate=8.0, prefix_groups=1, prefix_tokens=1000, prompt_tokens="20"),
            simulation(rate=8.0, prompt_tokens="1020"),
        ]
    )
    assert alone.prefill_tokens == 200 * 1020
    assert shared.cached_tokens + shared.prefill_tokens == 200 * 1020
    assert shared.prefill_tokens < 0.1 * alone.prefill_tokens


def test_who_asks_little_does_not_wait_for_who_asks_much_if_shares_are_fair() -> None:
    crowded = simulation(requests=3000, rate=51.0, tenant_weights="50,1")
    limits = {"max_concurrent_requests": 10_000, "max_batch_size": 32}
    fair, first_come = (
        Simulation(
            deployment=DEPLOYMENT.model_copy(update={"fairness": fairness, **limits}),
            workload=crowded.workload,
        )
        for fairness in ("tenant", "none")
    )
    shared, queued, alone = simulate([fair, first_come, simulation(requests=60, rate=1.0)])
    small = shared.first_token_of["2"].percentile(90)
    assert small < 0.05 * queued.first_token_of["2"].percentile(90)
    assert small < 5 * alone.first_token.percentile(90)
    assert shared.first_token_of["1"].count + shared.first_token_of["2"].count == 3000


def test_one_replica_stands_for_all_of_them() -> None:
    one, three = simulate([simulation(rate=30.0), simulation(rate=90.0, requests=600, replicas=3)])
    assert three.replicas == 3
    assert three.offered == three.finished == 600
    assert three.output_tokens == pytest.approx(3 * one.output_tokens, rel=0.2)
    assert three.first_token.percentile(50) == pytest.approx(one.first_token.percentile(50), 0.3)
    busy = next(figure for figure in FIGURES if figure.name == "busy")
    assert busy.of(three) == pytest.approx(busy.of(one), rel=0.15)


def test_clients_and_their_requests_are_divided_among_replicas() -> None:
    (metrics,) = simulate([simulation(clients=5, requests=41, replicas=3)])
    # The first replica has two of the clients and 14 of the requests.
    assert metrics.finished == 3 * 14
    assert metrics.row_seconds / metrics.busy_seconds <= 2.0


def test_processes_change_nothing() -> None:
    points = [simulation(rate=20.0, requests=30, replicas=2), simulation(clients=2, requests=30)]
    alone, together = simulate(points), simulate(points, processes=2)
    for one, other in zip(alone, together, strict=True):
        assert figures(one) == figures(other)
