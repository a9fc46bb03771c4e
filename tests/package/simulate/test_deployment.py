from __future__ import annotations

import pytest
from pydantic import ValidationError

from millrace.simulate.deployment import Deployment
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
def test_flags_mean_what_they_mean_to_the_router(flags: dict[str, object]) -> None:
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
        ({"cost_model": {"step": 1.0}}, "a cost model has the coefficients"),
        ({"cost_model": COST | {"step": -1.0}}, "costs are finite and not negative"),
        ({"num_blocks": 50}, "beyond the KV blocks, 784 tokens"),
        ({"max_input_tokens": 900}, "max_input_tokens must be < max_total_tokens"),
        ({"priority_ageing": -1}, "greater than or equal to 0"),
        ({"target_inter_token_latency": 0}, "greater than 0"),
    ],
)
def test_what_cannot_be_deployed_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        deployment(**changes)


def test_a_switch_takes_the_words_the_router_takes() -> None:
    assert deployment(prefix_caching="false").prefix_caching == "off"
