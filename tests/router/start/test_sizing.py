"""What a deployment says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from millrace_router.config import RouterConfig
from millrace_router.shards.wire import Capacity
from millrace_router.start.shards import RouterDeployment
from millrace_testing.router.edge import FakeBatcher, services_over

INFO = services_over(FakeBatcher()).shard
CAPACITY = Capacity(
    num_blocks=11,
    max_batch_total_tokens=5000,
    max_input_tokens=100,
    max_total_tokens=200,
    kv_bytes_per_token=1,
)


@pytest.mark.parametrize(
    ("device", "num_shard", "variable", "strict_tgi", "compute_type"),
    [
        ("cpu", 1, None, False, "1-cpu"),
        ("cuda", 2, None, False, "2-cuda"),
        ("cuda", 2, "2-nvidia-h100", False, "2-nvidia-h100"),
        ("cpu", 1, "", False, "1-cpu"),
        ("cpu", 1, None, True, "gpu+optimized"),
        ("cuda", 2, "2-nvidia-h100", True, "2-nvidia-h100"),
    ],
)
def test_answers_name_what_computes(
    device: str,
    num_shard: int,
    variable: str | None,
    compute_type: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    strict_tgi: bool,
) -> None:
    if variable is None:
        monkeypatch.delenv("COMPUTE_TYPE", raising=False)
    else:
        monkeypatch.setenv("COMPUTE_TYPE", variable)
    deployment = RouterDeployment(
        config=RouterConfig(model_folder=Path("/nowhere"), strict_tgi=strict_tgi),
        info=replace(INFO, device_type=device, world_size=num_shard),
        capacity=CAPACITY,
    )
    assert deployment.compute_type == compute_type
