"""Fleets of several cells, over processes and as samples."""

from __future__ import annotations

from typing import Any

import pytest
from bench.scale.cell import Failure
from bench.scale.fleet import Fleet, simulate
from bench.scale.fleet_metrics import FLEET_FIGURES, FleetMetrics
from tests.bench.scale.test_fleet import DEPLOYMENT

from millrace.simulate.workload import Workload


def fleet(*, replicas: int = 12, sample: int | None = None, **changes: Any) -> Fleet:
    values = {
        "requests": 300,
        "rate": 60.0,
        "output_tokens": "uniform:1:60",
        "prompt_tokens": "uniform:1:300",
        "prefix_groups": 20,
        "prefix_tokens": 200,
    }
    load = {name: changes.pop(name) for name in list(changes) if name in Workload.model_fields}
    return Fleet(
        deployment=DEPLOYMENT,
        workload=Workload.model_validate(values | load),
        replicas=replicas,
        sample=sample or replicas,
        **({"cell_size": 4} | changes),
    )


def figures(metrics: FleetMetrics) -> dict[str, float]:
    return {figure.name: figure.of(metrics) for figure in FLEET_FIGURES}


@pytest.mark.parametrize("routing", ["least-loaded", "kv"])
def test_every_request_ends_in_one_cell_whatever_process_simulates_it(routing: Any) -> None:
    alone, together = (
        simulate([fleet(routing=routing)], processes=processes)[0] for processes in (1, 2)
    )
    assert alone.replicas == together.replicas == 12
    assert alone.finished == together.finished == 300
    assert figures(alone) == pytest.approx(figures(together))


def test_clients_are_divided_among_cells() -> None:
    clients = fleet(rate=None, clients=24, routing="least-loaded")
    (metrics,) = simulate([clients])
    assert metrics.finished == 300
    assert metrics.row_seconds / metrics.busy_seconds <= 24.0


def test_a_sample_has_whole_cells_and_stands_for_all() -> None:
    whole, third = simulate([fleet(routing="prefix"), fleet(routing="prefix", sample=3)])
    assert third.replicas == 12
    assert third.finished == pytest.approx(whole.finished, rel=0.4)
    assert fleet(routing="prefix", sample=3).num_simulated_cells == 1
    assert fleet(routing="round-robin", sample=3).num_simulated_cells == 3
    assert fleet(routing="round-robin", sample=3, gateways=2).num_simulated_cells == 1


def test_who_knows_more_computes_less_twice() -> None:
    found = simulate(
        [fleet(routing=each) for each in ("round-robin", "least-loaded", "prefix", "kv")]
    )
    in_turn, loaded, hashed, exact = (metrics.recomputed_tokens for metrics in found)
    assert max(exact, hashed) < 0.4 * min(in_turn, loaded)
    assert {metrics.finished for metrics in found} == {300}
    for metrics in found:
        assert metrics.cached_tokens + metrics.prefill_tokens == found[0].cached_tokens + (
            found[0].prefill_tokens
        )


def test_gateways_that_know_less_balance_worse() -> None:
    one, many = (
        simulate(
            [fleet(routing="least-loaded", cell_size=12, gateways=count, requests=1200, rate=250.0)]
        )[0]
        for count in (1, 12)
    )
    assert one.finished == many.finished == 1200
    assert one.first_token.percentile(90) < many.first_token.percentile(90)


def test_failures_are_spread_over_cells() -> None:
    (metrics,) = simulate([fleet(routing="least-loaded", failures=(Failure(1.0, 3, 2.0),))])
    assert metrics.finished == 300
    assert metrics.rejected == {}
    assert metrics.resent > 0
