from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from millrace.simulate.deployment import Deployment
from millrace.simulate.report import FIGURES, as_json
from millrace.simulate.simulation import Simulation, simulate
from millrace.simulate.workload import Workload
from millrace_router.config import RouterConfig
from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.scheduler.factory import budgets_from
from millrace_router.scheduler.tenants import TenantQueue

COST = dict.fromkeys(COEFFICIENTS, 0.001)


def deployment(**changes: object) -> Deployment:
    values = {"cost_model": COST, "num_blocks": 101, "block_size": 16, "max_total_tokens": 900}
    return Deployment.model_validate(values | changes)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"kv_reservation": "full", "prefix_caching": "off", "max_batch_size": 7},
        {"prefill_order": "arrival", "steps_in_flight": 1},
        {"target_inter_token_latency": 50.0, "max_concurrent_requests": 9},
        {"fairness": "tenant", "priority_ageing": 3.0, "max_queue_wait": 2.0},
    ],
)
def test_flags_have_the_same_meaning_as_in_the_router(flags: dict[str, object]) -> None:
    simulated = deployment(max_batch_prefill_tokens=1000, **flags)
    config = RouterConfig.model_construct(**flags)  # type: ignore[arg-type]
    size = config.max_batch_size or config.max_concurrent_requests
    planner = simulated.new_planner(CostModel.fixed(COST))
    assert planner.budgets == budgets_from(config, prefill_tokens=1000, batch_size=size)
    assert (planner.blocks.cache is not None) == (config.prefix_caching == "on")
    assert (planner.blocks.num_blocks, planner.blocks.block_size) == (100, 16)
    assert isinstance(simulated.new_queue(), TenantQueue) == (config.fairness == "tenant")


def test_defaults_are_those_of_the_router() -> None:
    shared = Deployment.model_fields.keys() & RouterConfig.model_fields.keys()
    assert "max_batch_prefill_tokens" in shared
    for name in shared - {"max_total_tokens"}:
        assert Deployment.model_fields[name].default == RouterConfig.model_fields[name].default


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"cost_model": {}}, "the server has not served enough to know"),
        ({"cost_model": {"step": 1.0}}, "a cost model needs the coefficients"),
        ({"cost_model": COST | {"step": -1.0}}, "costs must be finite and not negative"),
        ({"num_blocks": 50}, "beyond the KV blocks, 784 tokens"),
        ({"max_input_tokens": 900}, "max_input_tokens must be < max_total_tokens"),
        ({"priority_ageing": -1}, "greater than or equal to 0"),
        ({"target_inter_token_latency": 0}, "greater than 0"),
    ],
)
def test_impossible_deployments_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        deployment(**changes)


RECORDED = Path(__file__).parent / "one_replica.json"
"""Figures of one server, step by step."""

COST_MODEL = {
    "step": 0.012,
    "decode_row": 0.00012,
    "decode_context_token": 4e-8,
    "prefill_step": 0.004,
    "prefill_token": 0.00006,
    "prefill_pair": 4e-9,
}
LENGTHS = {"prompt_tokens": "lognormal:300:1:3000", "output_tokens": "lognormal:120:1:1000"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "open": ({}, {"rate": 6.0, "requests": 400}),
    "overloaded": ({"max_queue_wait": 5.0}, {"rate": 30.0, "requests": 400}),
    "preempted": ({"num_blocks": 300}, {"rate": 5.0, "requests": 200}),
    "closed": (
        {"step_ratios": (1.0, 1.2, 0.9), "turn_seconds": 0.001},
        {"clients": 12, "requests": 200, "think_seconds": 0.3},
    ),
    "groups": (
        {"block_size": 64, "num_blocks": 200, "entry_seconds": 0.002},
        {"rate": 8.0, "requests": 300, "prefix_groups": 5, "burst_size": 3},
    ),
    "tenants": (
        {"fairness": "tenant", "max_batch_size": 8},
        {"rate": 6.0, "requests": 200, "tenant_weights": "9,1", "adapters": 20},
    ),
}


def figures(name: str) -> dict[str, Any]:
    """Every figure of a case; JSON has each float with all its digits."""
    changes, load = CASES[name]
    values = {
        "cost_model": COST_MODEL,
        "num_blocks": 1500,
        "block_size": 16,
        "max_total_tokens": 4096,
    }
    simulation = Simulation(
        deployment=Deployment.model_validate(values | changes),
        workload=Workload.model_validate(LENGTHS | load),
    )
    (point,) = json.loads(as_json([], list(simulate([simulation]))))
    assert isinstance(point, dict)
    return point


@pytest.mark.parametrize("name", CASES)
def test_one_replica_gives_the_recorded_figures_to_the_bit(name: str) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    found = figures(name)
    assert {figure: found[figure] for figure in recorded} == recorded


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


def test_clients_wait_for_their_answers() -> None:
    (metrics,) = simulate([simulation(clients=4, requests=40)])
    assert metrics.finished == 40
    assert metrics.row_seconds / metrics.busy_seconds <= 4.0
    (alone,) = simulate([simulation(clients=1, requests=40)])
    assert alone.row_seconds / alone.busy_seconds == pytest.approx(1.0)
    assert alone.ended_at == pytest.approx(alone.latency.mean * 40)


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


def test_with_fair_shares_a_small_tenant_does_not_wait_for_a_large_one() -> None:
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
