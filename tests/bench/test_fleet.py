"""Replicas side by side: against a cell that lets every replica take each step by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
from bench.scale.cell import Cell, Failure
from bench.scale.fleet import Fleet, simulate
from bench.scale.fleet_metrics import FLEET_FIGURES, FleetMetrics, total
from bench.scale.simulated_replica import CellParts, Routing
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.simulate.deployment import Deployment
from millrace.simulate.metrics import Distribution
from millrace.simulate.simulated_request import Arrival
from millrace.simulate.workload import OpenLoop, Workload

COST_MODEL = {
    "step": 0.011,
    "decode_row": 0.00013,
    "decode_context_token": 1e-7,
    "prefill_step": 0.003,
    "prefill_token": 0.0001,
    "prefill_pair": 0.0,
}


def deployment(**changes: Any) -> Deployment:
    values = {
        "cost_model": COST_MODEL,
        "num_blocks": 60,
        "block_size": 16,
        "max_total_tokens": 512,
        "step_ratios": (1.0, 1.3, 0.8),
    }
    return Deployment.model_validate(values | changes)


def parts(routing: Routing, *, replicas: int = 3, gateways: int = 1, **changes: Any) -> CellParts:
    return CellParts(
        deployment(**changes),
        num_replicas=replicas,
        num_gateways=gateways,
        routing=routing,
        balance_factor=1.25,
    )


class PlainCell(Cell):
    """Advances every replica step by step up to each arrival, without fast-forward."""

    def _advance(self, until: float) -> None:
        while True:
            replica = min(self._replicas, key=lambda each: each.next_event)
            if replica.next_event >= until:
                return
            replica.step()


def simulated(kind: type[Cell], made: CellParts, arrivals: list[Arrival]) -> FleetMetrics:
    return kind(made, OpenLoop(iter(arrivals))).run()


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    now, arrivals = 0.0, []
    for _ in range(draw(st.integers(1, 40))):
        now += draw(st.sampled_from([0.0, math.sqrt(2) / 50, math.sqrt(3) / 3, 2.1]))
        group = draw(st.sampled_from(["", "a", "b", "c"]))
        arrivals.append(
            Arrival(
                now,
                prompt_tokens=draw(st.integers(1, 200)),
                output_tokens=draw(st.integers(1, 120)),
                max_new_tokens=draw(st.one_of(st.none(), st.integers(1, 60))),
                group=group,
                prefix_tokens=draw(st.integers(0, 150)) if group else 0,
            )
        )
    return arrivals


COUNTS = ("offered", "finished", "output_tokens", "load_max", "steps", "preemptions")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["round-robin", "least-loaded", "prefix"]), st.integers(1, 2), workloads())
def test_fast_forwarded_replicas_end_like_those_advanced_step_by_step(
    routing: Routing, gateways: int, arrivals: list[Arrival]
) -> None:
    fast, slow = (
        simulated(kind, parts(routing, gateways=gateways), arrivals) for kind in (Cell, PlainCell)
    )
    for name in COUNTS:
        assert getattr(fast, name) == getattr(slow, name), name
    for name in ("first_token", "latency", "between_tokens"):
        one, other = getattr(fast, name), getattr(slow, name)
        assert isinstance(one, Distribution)
        assert one.count == other.count
        assert one.mean == pytest.approx(other.mean)


def spaced(count: int, *, group: str = "", apart: float = 0.05) -> list[Arrival]:
    prefix = 160 if group else 0
    return [
        Arrival(apart * number, 200, 40, 40, group=group, prefix_tokens=prefix)
        for number in range(count)
    ]


def test_tokens_are_computed_twice_where_several_replicas_compute_them() -> None:
    arrivals = spaced(30, group="a", apart=2.0)
    spread = simulated(Cell, parts("round-robin"), arrivals)
    gathered = simulated(Cell, parts("kv"), arrivals)
    # Each of three replicas computes the ten blocks of the group once.
    assert spread.recomputed_tokens == 2 * 160
    assert gathered.recomputed_tokens == 0
    assert spread.prefill_tokens == 30 * 200 - 27 * 160
    assert gathered.prefill_tokens == 30 * 200 - 29 * 160
    assert gathered.cached_tokens == 29 * 160


def failing(routing: Routing, *failures: Failure, replicas: int = 3) -> FleetMetrics:
    cell = Cell(parts(routing, replicas=replicas), OpenLoop(iter(spaced(60))), failures)
    return cell.run()


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix", "kv"])
def test_requests_of_a_failed_replica_are_resent_and_finish(routing: Routing) -> None:
    whole, hurt = failing(routing), failing(routing, Failure(1.0, 2, 1.5))
    assert hurt.offered == hurt.finished == 60
    assert hurt.output_tokens == whole.output_tokens == 60 * 40
    assert hurt.first_token.count == 60
    assert 0 < hurt.broken <= hurt.resent
    assert hurt.recomputed_tokens > 0
    assert hurt.latency.mean > whole.latency.mean
    # A request that is sent again waits from its first sending on.
    assert hurt.latency.percentile(100) > whole.latency.percentile(100)


def test_without_any_replica_requests_are_refused_until_one_is_back() -> None:
    hurt = failing("least-loaded", Failure(1.0, 3, 1.0))
    # From second 1 to before 2 there are 20 arrivals, and whatever was in progress is sent again at once.
    assert hurt.rejected["no replica"] == 20 + hurt.resent
    assert hurt.finished == 40 - hurt.resent
    assert hurt.offered == 60


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


def fleet_of_cells(*, replicas: int = 12, sample: int | None = None, **changes: Any) -> Fleet:
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


@pytest.mark.parametrize("routing", ["least-loaded", "kv"])
def test_every_request_ends_in_one_cell_for_any_number_of_processes(routing: Any) -> None:
    alone, together = (
        simulate([fleet_of_cells(routing=routing)], processes=processes)[0] for processes in (1, 2)
    )
    assert alone.replicas == together.replicas == 12
    assert alone.finished == together.finished == 300
    assert figures(alone) == pytest.approx(figures(together))


def test_routing_with_more_knowledge_recomputes_fewer_tokens() -> None:
    found = simulate(
        [fleet_of_cells(routing=each) for each in ("round-robin", "least-loaded", "prefix", "kv")]
    )
    in_turn, loaded, hashed, exact = (metrics.recomputed_tokens for metrics in found)
    assert max(exact, hashed) < 0.4 * min(in_turn, loaded)
    assert {metrics.finished for metrics in found} == {300}
    for metrics in found:
        assert metrics.cached_tokens + metrics.prefill_tokens == found[0].cached_tokens + (
            found[0].prefill_tokens
        )
