"""The order of the stages and the division of time between them."""

from __future__ import annotations

import importlib

import pytest
from bench.gpu.plan import STAGES, TOTAL_SECONDS, limit_seconds

MOST_SECONDS = 600
"""Ten minutes."""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_stages_that_use_all_their_time_end_with_the_run(device: str) -> None:
    shares = [stage.share_on(device) for stage in STAGES]
    left = TOTAL_SECONDS
    for place in range(len(shares)):
        limit = limit_seconds(shares[place:], left)
        assert limit >= 0.9 * shares[place]
        left -= limit
    assert left == pytest.approx(0)
    assert TOTAL_SECONDS < MOST_SECONDS


def test_time_that_a_stage_leaves_is_shared_by_all_later_ones() -> None:
    assert limit_seconds([10, 20, 30], 60) == 10
    # The first stage ended at once.
    assert limit_seconds([20, 30], 60) == 24
    assert limit_seconds([30], 36) == 36


def test_a_stage_that_ends_late_leaves_no_negative_time() -> None:
    assert limit_seconds([10, 20], -3) == 0


def test_every_stage_is_a_module_that_runs() -> None:
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    for stage in STAGES:
        assert callable(importlib.import_module(stage.module).run)


def test_the_stages_run_in_the_order_of_a_first_hour() -> None:
    order = ["versions", "agreement", "bits", "capture", "verify", "steps", "sanitizer", "decode"]
    names = [stage.name for stage in STAGES]
    assert names[: len(order)] == order
    assert names.index("decode") < names.index("server") < names.index("transformers")
    assert names.index("transformers") < names.index("memory") < names.index("faults")
