"""The measurement of step costs before the first request."""

from __future__ import annotations

import pytest
import structlog

from millrace_router.engine import calibration
from millrace_router.engine.calibration import calibrate
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.limits import Limits
from millrace_testing.router.fake_router import DirectShards, new_batcher
from millrace_testing.shards.fake_shard import FakeShard
from millrace_testing.shards.hash_tokens import VOCAB_SIZE

LIMITS = Limits(max_input_tokens=40, max_total_tokens=48, vocab_size=VOCAB_SIZE)


async def test_costs_are_known_afterwards_and_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "SECONDS", 60.0)
    shard = FakeShard(num_blocks=300)
    batcher = new_batcher(DirectShards(shard), shard)
    cost = batcher._predictor.cost
    assert cost.seconds(StepLoad(decodes=1, context=10)) is None
    await calibrate(batcher, LIMITS, max_batch_size=4)
    assert cost.seconds(StepLoad(decodes=1, context=10)) is not None
    assert cost.seconds(StepLoad(prefill_tokens=16, prefill_pairs=136, num_chunks=1)) is not None
    assert not batcher._planner.rows
    assert batcher._planner.blocks.num_owned == 0


async def test_shards_that_fail_are_reported_and_do_not_stop_the_start() -> None:
    shard = FakeShard()
    shard.fail_always = "the device caught fire"
    batcher = new_batcher(DirectShards(shard), shard)
    with structlog.testing.capture_logs() as logs:
        await calibrate(batcher, LIMITS, max_batch_size=4)
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "quarantined" in warning["error"]
