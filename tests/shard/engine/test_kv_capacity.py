"""The rule that turns memory into tokens, on plain numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_shard.engine.kv_capacity import (
    CacheShape,
    Capacity,
    CapacityError,
    KVMemory,
    WarmupRequest,
    blocks_in,
    cpu_memory,
    cuda_memory,
    plan_capacity,
    spread_prefill,
)

GB = 2**30
SHAPE = CacheShape(block_size=64, bytes_per_token=1024, max_position_embeddings=4096)


def plan(fitting: int = 1000, *, is_budget: bool = False, **limits: Any) -> Capacity:
    request = WarmupRequest(
        max_batch_prefill_tokens=4096,
        max_batch_size=32,
        **{"max_concurrent_requests": 128, **limits},
    )
    return plan_capacity(request, SHAPE, fitting_blocks=fitting, is_budget=is_budget)


def test_the_cache_takes_a_quarter_of_the_memory_by_default() -> None:
    assert cpu_memory(available=8 * GB, kv_memory=None) == KVMemory(
        bytes=2 * GB, is_budget=False, max_bytes=8 * GB
    )
    assert cpu_memory(available=8 * GB, kv_memory=7 * GB) == KVMemory(
        bytes=7 * GB, is_budget=True, max_bytes=7 * GB
    )


def test_a_gpu_is_filled_up_to_its_fraction() -> None:
    assert cuda_memory(free=50 * GB, total=80 * GB, fraction=1.0, kv_memory=None).bytes == 48 * GB
    half = cuda_memory(free=65 * GB, total=80 * GB, fraction=0.5, kv_memory=None)
    assert half == KVMemory(bytes=24 * GB, is_budget=True, max_bytes=25 * GB)
    assert cuda_memory(free=GB, total=80 * GB, fraction=0.5, kv_memory=None).bytes == 0
    assert cuda_memory(free=GB, total=80 * GB, fraction=0.5, kv_memory=5).bytes == 5


def test_the_reserved_block_is_paid_for() -> None:
    assert blocks_in(KVMemory(bytes=64 * 1024 * 10, is_budget=True, max_bytes=0), SHAPE) == 9
    assert blocks_in(KVMemory(bytes=100, is_budget=True, max_bytes=0), SHAPE) == 0


def test_limits_left_open_follow_from_memory_and_model() -> None:
    large = plan(is_budget=True)
    assert (large.max_total_tokens, large.max_input_tokens) == (4096, 4095)
    assert (large.num_blocks, large.max_batch_total_tokens) == (1001, 64000)
    small = plan(10, is_budget=True)
    assert (small.max_total_tokens, small.max_input_tokens) == (640, 639)


def test_no_more_is_taken_than_concurrent_requests_can_fill() -> None:
    result = plan(max_total_tokens=100, max_concurrent_requests=3)
    assert result.num_blocks == 3 * 2 + 1
    assert plan(max_total_tokens=100, max_concurrent_requests=3, is_budget=True).num_blocks == 1001
    assert plan(5, max_total_tokens=100, max_concurrent_requests=3).num_blocks == 6


def test_the_users_bound_is_kept_up_to_a_block() -> None:
    result = plan(max_batch_total_tokens=1000, max_concurrent_requests=1)
    assert result.max_batch_total_tokens == 1024
    assert result.max_total_tokens == 1024
    assert plan(3, max_batch_total_tokens=1000).max_batch_total_tokens == 192


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_total_tokens": 641}, "Not enough memory to handle `max_total_tokens`=641"),
        (
            {"max_total_tokens": 600, "max_batch_total_tokens": 500},
            "Not enough memory to handle `max_total_tokens`=600",
        ),
        ({"max_total_tokens": 5000}, "more than the model's 4096 positions"),
        ({"max_total_tokens": 500, "max_input_tokens": 500}, "`max_input_tokens` must be <"),
        ({"max_input_tokens": 640}, "`max_input_tokens` must be < `max_total_tokens`"),
    ],
)
def test_limits_that_cannot_be_kept_are_named(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(CapacityError, match=message.replace("(", r"\(")):
        plan(10, **limits)


def test_no_memory_at_all_is_an_error() -> None:
    with pytest.raises(CapacityError):
        plan(0)


@given(
    fitting=st.integers(1, 5000),
    total=st.none() | st.integers(2, 4096),
    bound=st.none() | st.integers(1, 10**6),
    concurrent=st.integers(1, 300),
    is_budget=st.booleans(),
    more=st.integers(0, 5000),
)
def test_what_is_promised_fits(
    *,
    fitting: int,
    total: int | None,
    bound: int | None,
    concurrent: int,
    is_budget: bool,
    more: int,
) -> None:
    try:
        result = plan(
            fitting,
            is_budget=is_budget,
            max_total_tokens=total,
            max_batch_total_tokens=bound,
            max_concurrent_requests=concurrent,
        )
    except CapacityError:
        assert total is not None
        assert total > min(fitting * 64, bound or 10**9)
        return
    assert 1 < result.num_blocks <= fitting + 1
    assert result.max_input_tokens < result.max_total_tokens <= result.max_batch_total_tokens
    assert total in (None, result.max_total_tokens)
    limits: dict[str, Any] = {
        "is_budget": is_budget,
        "max_total_tokens": total,
        "max_batch_total_tokens": bound,
        "max_concurrent_requests": concurrent,
        "num_blocks": result.num_blocks,
    }
    assert plan(result.num_blocks - 1 + more, **limits) == result, "a later life differs"
    with pytest.raises(CapacityError, match="the previous group had"):
        plan(result.num_blocks - 2, **limits)


def test_a_cache_of_an_earlier_life_may_have_all_there_is() -> None:
    memory = cpu_memory(available=8 * GB, kv_memory=None)
    first = WarmupRequest(max_batch_prefill_tokens=1, max_batch_size=1, max_concurrent_requests=1)
    again = replace(first, num_blocks=7)
    assert memory.for_request(first).bytes == 2 * GB
    assert memory.for_request(again).bytes == 8 * GB
    assert first == again, "a new router, which knows of no earlier life, keeps the cache"


@pytest.mark.parametrize(
    ("num_tokens", "max_rows", "num_blocks", "lengths"),
    [
        (1000, 8, 99, [400, 400, 200]),
        (1000, 2, 99, [400, 400]),
        (1000, 8, 10, [400, 192]),
        (1000, 8, 7, [400]),
        (0, 8, 99, []),
    ],
)
def test_the_largest_prefill_is_spread_over_few_long_prompts(
    num_tokens: int, max_rows: int, num_blocks: int, lengths: list[int]
) -> None:
    result = spread_prefill(
        num_tokens, max_rows=max_rows, longest=400, num_blocks=num_blocks, block_size=64
    )
    assert result == lengths
