from __future__ import annotations

from typing import Any

import pytest
from bench.scale.fleet import Fleet, simulate
from bench.scale.fleet_metrics import FLEET_FIGURES, FleetMetrics, total

from millrace.simulate.deployment import Deployment
from millrace.simulate.metrics import Distribution
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


def fleet(*, replicas: int = 1, sample: int | None = None, **workload: Any) -> Fleet:
    values = {"requests": 200, "output_tokens": "uniform:1:60", "prompt_tokens": "uniform:1:300"}
    return Fleet(
        deployment=DEPLOYMENT,
        workload=Workload.model_validate(values | workload),
        replicas=replicas,
        sample=sample or replicas,
    )


def figures(metrics: FleetMetrics) -> dict[str, float]:
    return {figure.name: figure.of(metrics) for figure in FLEET_FIGURES}


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
    busy = next(figure for figure in FLEET_FIGURES if figure.name == "busy")
    assert busy.of(third) == pytest.approx(busy.of(whole), rel=0.15)


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


def test_metrics_add_up_to_counts_extremes_and_the_span_of_all() -> None:
    one = FleetMetrics(replicas=1, finished=3, started_at=2.0, ended_at=9.0, kv_max=0.5)
    other = FleetMetrics(replicas=1, finished=4, started_at=1.0, ended_at=8.0, kv_max=0.7)
    one.rejected["overloaded"] += 2
    other.first_token_of["x"] = Distribution()
    other.first_token_of["x"].add(0.25)
    both = total([one, other])
    assert (both.replicas, both.finished, both.kv_max) == (2, 7, 0.7)
    assert (both.started_at, both.ended_at) == (1.0, 9.0)
    assert both.rejected == {"overloaded": 2}
    assert both.first_token_of["x"].count == 1
    assert total([]).finished == 0


def test_a_sum_has_the_distribution_of_all_values() -> None:
    one, other, both = (FleetMetrics() for _ in range(3))
    for number in range(40):
        for metrics in (one if number % 3 else other, both):
            metrics.latency.add(0.1 * number)
    merged = total([one, other]).latency
    assert merged.count == both.latency.count == 40
    for percent in (1, 50, 99):
        assert merged.percentile(percent) == pytest.approx(both.latency.percentile(percent))
