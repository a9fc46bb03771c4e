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
    WindowShape,
    blocks_in,
    cpu_memory,
    cuda_memory,
    feature_rows_in,
    plan_capacity,
    second_pages,
    spread_prefill,
    state_pages_in,
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
def test_the_promised_capacity_fits_the_limits(
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


def windowed(*, full: int = 4, window: int = 22, width: int = 512) -> CacheShape:
    """A shape like that of Gemma 3 1B: layers of 1 KiB a token, of which some see `width` positions."""
    group = WindowShape(
        window=width, reach=width - 1 + 192, num_layers=window, bytes_per_token=1024 * window
    )
    return CacheShape(
        block_size=64,
        bytes_per_token=1024 * (full + window),
        max_position_embeddings=32768,
        windows=(group,),
    )


def divided(
    shape: CacheShape, gigabytes: float, *, rows: int = 128, **limits: Any
) -> tuple[Capacity, int]:
    """The capacity in so much memory, and the bytes of its blocks."""
    request = WarmupRequest(
        max_batch_prefill_tokens=limits.pop("prefill", 4096),
        max_batch_size=rows,
        max_concurrent_requests=128,
        **limits,
    )
    fitting = int(gigabytes * GB) // (shape.bytes_per_token * 64) - 1
    capacity = plan_capacity(request, shape, fitting_blocks=fitting, is_budget=True)
    own = shape.bytes_per_token - sum(each.bytes_per_token for each, _ in capacity.windows)
    tokens = own * capacity.num_blocks
    tokens += sum(each.bytes_per_token * count for each, count in capacity.windows)
    return capacity, tokens * 64


@given(
    full=st.integers(0, 30),
    window=st.integers(1, 30),
    width=st.sampled_from([1, 128, 512, 4096]),
    gigabytes=st.floats(0.01, 40),
    rows=st.integers(1, 256),
    total=st.sampled_from([None, 600, 2048, 8192, 32768]),
    prefill=st.integers(1, 8192),
)
def test_groups_never_take_more_memory_and_a_restart_has_the_same_blocks(
    full: int,
    window: int,
    width: int,
    gigabytes: float,
    rows: int,
    total: int | None,
    prefill: int,
) -> None:
    shape = windowed(full=full, window=window, width=width)
    limits: dict[str, Any] = {"rows": rows, "max_total_tokens": total, "prefill": prefill}
    try:
        whole, _ = divided(replace(shape, windows=()), gigabytes, **limits)
    except CapacityError:
        return
    capacity, num_bytes = divided(shape, gigabytes, **limits)
    assert num_bytes <= gigabytes * GB
    assert capacity.num_blocks >= whole.num_blocks
    for group, count in capacity.windows:
        # A row can go on, and a window has no more blocks than the full layers.
        assert -(-group.reach // 64) + 2 < count <= capacity.num_blocks
    again, _ = divided(
        shape,
        gigabytes,
        **limits,
        num_blocks=capacity.num_blocks,
        window_blocks=tuple(count for _, count in capacity.windows),
    )
    assert again == capacity


def test_windows_leave_most_memory_to_the_other_layers() -> None:
    shape = windowed()
    whole, _ = divided(replace(shape, windows=()), 8, max_total_tokens=8192)
    capacity, _ = divided(shape, 8, max_total_tokens=8192)
    assert capacity.max_batch_total_tokens > 2.5 * whole.max_batch_total_tokens
    assert capacity.kv_bytes_per_token * capacity.num_blocks * 64 <= 8 * GB


def test_windows_get_blocks_for_every_row_where_memory_allows() -> None:
    capacity, _ = divided(windowed(), 8, rows=16, max_total_tokens=8192)
    ((group, count),) = capacity.windows
    per_row = -(-group.reach // 64) + 2
    assert count > 16 * per_row + 2 * 4096 // 64


@pytest.mark.parametrize(("total", "gigabytes"), [(600, 8), (2048, 0.1)])
def test_windows_that_save_nothing_have_no_group(total: int, gigabytes: float) -> None:
    shape = windowed()
    limits: dict[str, Any] = {"max_total_tokens": total}
    capacity, _ = divided(shape, gigabytes, **limits)
    assert capacity == divided(replace(shape, windows=()), gigabytes, **limits)[0]
    assert capacity.windows == ()


def test_a_model_of_windows_only_needs_no_memory_beyond_them() -> None:
    capacity, num_bytes = divided(windowed(full=0, window=32, width=4096), 8)
    ((_, count),) = capacity.windows
    assert num_bytes == count * 64 * 32 * 1024 <= 8 * GB
    assert capacity.num_blocks > count


def test_another_number_of_groups_than_before_is_refused() -> None:
    with pytest.raises(CapacityError, match="2 window groups"):
        divided(windowed(), 8, num_blocks=100, window_blocks=(20, 20))
    with pytest.raises(CapacityError, match="the previous group had"):
        divided(windowed(), 8, num_blocks=10**6, window_blocks=(10**5,))


def rows_for(num_bytes: int, **limits: Any) -> int:
    """Rows for features of 1 KiB in tiles of 64, of which the largest image has 65."""
    request = WarmupRequest(
        max_batch_prefill_tokens=4096, max_batch_size=32, max_concurrent_requests=128, **limits
    )
    memory = KVMemory(bytes=num_bytes, is_budget=True, max_bytes=num_bytes)
    return feature_rows_in(
        memory, request, row_bytes=1024, tile_rows=64, max_tiles=65, max_positions=4096
    )


def test_features_of_images_have_a_sixteenth_of_the_memory_at_most() -> None:
    assert rows_for(16 * 2**20 + 9) == 1024
    assert rows_for(16 * 64 * 1024) == 64
    assert rows_for(GB) == 8 * 4096
    assert rows_for(GB, max_total_tokens=100) == 65 * 64
    assert rows_for(1, feature_rows=77) == 77
    with pytest.raises(CapacityError, match="--kv-memory"):
        rows_for(16 * 64 * 1024 - 1)


@given(st.integers(3, 10_000), st.integers(1, 200))
def test_pages_of_states_and_second_ones_fit_into_half_of_the_memory(fit: int, slots: int) -> None:
    memory = KVMemory(bytes=2 * fit * 100, is_budget=True, max_bytes=2 * fit * 100)
    request = WarmupRequest(
        max_batch_prefill_tokens=64, max_batch_size=slots, max_concurrent_requests=slots
    )
    plain = state_pages_in(memory, request, 100, drafts=False)
    pages = state_pages_in(memory, request, 100, drafts=True)
    assert plain == min(fit, 8 * slots)
    second = second_pages(pages, slots)
    assert pages + second <= fit
    # Every running sequence has both, and as many run as without draft tokens, or all that fit.
    assert second == min(slots, pages - 1)
    assert pages == plain or pages + second >= fit - 1


def test_states_of_drafts_need_memory_for_three_pages() -> None:
    memory = KVMemory(bytes=400, is_budget=True, max_bytes=400)
    request = WarmupRequest(
        max_batch_prefill_tokens=64, max_batch_size=4, max_concurrent_requests=4
    )
    assert state_pages_in(memory, request, 100, drafts=False) == 2
    with pytest.raises(CapacityError, match="and 3 must fit into 50%"):
        state_pages_in(memory, request, 100, drafts=True)
