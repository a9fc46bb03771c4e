"""A server has the same figures, to the last bit, whatever is done for speed or for fleets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.simulate.deployment import Deployment
from millrace.simulate.report import as_json
from millrace.simulate.simulation import Simulation, simulate
from millrace.simulate.workload import Workload

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
