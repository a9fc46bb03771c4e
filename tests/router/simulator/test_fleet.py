from __future__ import annotations

from typing import Any

import pytest

from millrace_router.simulator.deployment import Deployment
from millrace_router.simulator.fleet import Fleet, simulate
from millrace_router.simulator.metrics import Distribution, SimulationMetrics, total
from millrace_router.simulator.report import FIGURES
from millrace_router.simulator.workload import Workload

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


def fleet(*, replicas: int = 1, sample: int | None = None, **workload: Any) -> Fleet:
    values = {"requests": 200, "output_tokens": "uniform:1:60", "prompt_tokens": "uniform:1:300"}
    return Fleet(
        deployment=DEPLOYMENT,
        workload=Workload.model_validate(values | workload),
        replicas=replicas,
        sample=sample or replicas,
    )


def figures(metrics: SimulationMetrics) -> dict[str, float]:
    return {figure.name: figure.of(metrics) for figure in FIGURES}


def test_a_run_can_be_repeated() -> None:
    one, again = simulate([fleet(rate=20.0), fleet(rate=20.0)])
    assert figures(one) == figures(again)


def test_replicas_divide_the_requests_of_an_open_loop() -> None:
    (metrics,) = simulate([fleet(rate=20.0, replicas=3)])
    assert metrics.replicas == 3
    assert metrics.offered == metrics.finished == 200
    expected = sum(arrival.output_tokens for arrival in fleet(rate=20.0).workload.arrivals())
    assert metrics.output_tokens == expected


def test_a_third_of_the_load_on_a_third_of_the_replicas_looks_the_same() -> None:
    whole, third = simulate([fleet(rate=90.0, replicas=3), fleet(rate=90.0, replicas=3, sample=1)])
    assert third.replicas == 3
    assert third.offered == pytest.approx(whole.offered, abs=2)
    assert third.output_tokens == pytest.approx(whole.output_tokens, rel=0.2)
    assert third.first_token.percentile(50) == pytest.approx(whole.first_token.percentile(50), 0.3)
    busy = next(figure for figure in FIGURES if figure.name == "busy")
    assert busy.of(third) == pytest.approx(busy.of(whole), rel=0.15)


def test_clients_wait_for_their_answers() -> None:
    (metrics,) = simulate([fleet(clients=4, requests=40)])
    assert metrics.finished == 40
    assert metrics.row_seconds / metrics.busy_seconds <= 4.0
    (alone,) = simulate([fleet(clients=1, requests=40)])
    assert alone.row_seconds / alone.busy_seconds == pytest.approx(1.0)
    assert alone.ended_at == pytest.approx(alone.latency.mean * 40)


def test_clients_think_between_requests() -> None:
    (metrics,) = simulate([fleet(clients=1, requests=5, think_seconds=100.0)])
    assert metrics.ended_at == pytest.approx(400.0 + metrics.latency.mean * 5)


def test_clients_and_their_requests_are_divided_among_replicas() -> None:
    (metrics,) = simulate([fleet(clients=5, requests=41, replicas=3)])
    assert metrics.finished == 41


def test_one_group_goes_to_one_replica_if_routed_by_prefix() -> None:
    options: dict[str, Any] = {
        "rate": 20.0,
        "replicas": 4,
        "prefix_groups": 8,
        "prefix_tokens": 1024,
    }
    spread = fleet(**options)
    gathered = Fleet(
        deployment=DEPLOYMENT, workload=spread.workload, replicas=4, sample=4, routing="prefix"
    )
    one, other = simulate([spread, gathered])
    assert one.finished == other.finished == 200
    assert other.cached_tokens > 1.1 * one.cached_tokens
    assert other.prefill_tokens < one.prefill_tokens


def test_processes_change_nothing() -> None:
    fleets = [fleet(rate=20.0, requests=30, replicas=2), fleet(clients=2, requests=30)]
    alone, together = simulate(fleets), simulate(fleets, processes=2)
    for one, other in zip(alone, together, strict=True):
        assert figures(one) == pytest.approx(figures(other))


def test_a_group_shares_its_prefill() -> None:
    shared, alone = simulate(
        [
            fleet(rate=8.0, prefix_groups=1, prefix_tokens=1000, prompt_tokens="20"),
            fleet(rate=8.0, prompt_tokens="1020"),
        ]
    )
    assert alone.prefill_tokens == 200 * 1020
    assert shared.cached_tokens + shared.prefill_tokens == 200 * 1020
    assert shared.prefill_tokens < 0.1 * alone.prefill_tokens


def test_who_asks_little_does_not_wait_for_who_asks_much_if_shares_are_fair() -> None:
    crowded = fleet(requests=3000, rate=51.0, tenant_weights="50,1")
    limits = {"max_concurrent_requests": 10_000, "max_batch_size": 32}
    fair, first_come = (
        Fleet(
            deployment=DEPLOYMENT.model_copy(update={"fairness": fairness, **limits}),
            workload=crowded.workload,
        )
        for fairness in ("tenant", "none")
    )
    shared, queued, alone = simulate([fair, first_come, fleet(requests=60, rate=1.0)])
    small = shared.first_token_of["2"].percentile(90)
    assert small < 0.05 * queued.first_token_of["2"].percentile(90)
    assert small < 5 * alone.first_token.percentile(90)
    assert shared.first_token_of["1"].count + shared.first_token_of["2"].count == 3000


def test_metrics_add_up_to_counts_extremes_and_the_span_of_all() -> None:
    one = SimulationMetrics(replicas=1, finished=3, started_at=2.0, ended_at=9.0, kv_max=0.5)
    other = SimulationMetrics(replicas=1, finished=4, started_at=1.0, ended_at=8.0, kv_max=0.7)
    one.rejected["overloaded"] += 2
    other.first_token_of["x"] = Distribution()
    other.first_token_of["x"].add(0.25)
    both = total([one, other])
    assert (both.replicas, both.finished, both.kv_max) == (2, 7, 0.7)
    assert (both.started_at, both.ended_at) == (1.0, 9.0)
    assert both.rejected == {"overloaded": 2}
    assert both.first_token_of["x"].count == 1
    assert total([]).finished == 0
