"""Attention with a window reads nothing behind its reach, where others' blocks may be, not even to mask it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels, LayerCache, window_reach
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_testing.engines.kernels import make_kernels

QUERIES, CONTEXTS = (1, 1, 20, 1), (700, 577, 650, 30)
"""Single queries and a chunk; the last context is shorter than most windows."""
HEADS, KV_HEADS, DIM = 2, 1, 32
KINDS = [
    *(("plain", torch.float32, fixed) for fixed in (True, False)),
    *(("cpu", dtype, True) for dtype in (torch.float32, torch.bfloat16)),
    *(("triton", torch.float32, fixed) for fixed in (True, False)),
]


def kernels_of(name: str, dtype: torch.dtype, *, deterministic: bool) -> Kernels:
    if name != "triton":
        return make_kernels(name, deterministic=deterministic)
    pytest.importorskip("triton", reason="no Triton for this platform")
    from millrace_shard.kernels.cuda.operators import CudaKernels

    return CudaKernels(deterministic=deterministic)


def filled(
    kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> tuple[RaggedBatch, LayerCache]:
    """A step, and a cache with all positions of its sequences."""
    size = kernels.block_size
    whole = ragged_batch(CONTEXTS, CONTEXTS, block_size=size, device=device)
    batch = ragged_batch(QUERIES, CONTEXTS, block_size=size, device=device)
    cache = kernels.new_cache(
        num_blocks=int(whole.block_tables.max()) + 1,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
        device=device,
    )
    kernels.zero_blocks(cache, torch.arange(int(whole.block_tables.max()) + 1, device=device))
    shape = sum(CONTEXTS), KV_HEADS, DIM
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    kernels.store(keys, values, whole, cache)
    return batch, cache


def poison_behind(cache: LayerCache, batch: RaggedBatch, reach: int, size: int) -> int:
    """Make the blocks NaN that no query reaches; how many there are."""
    count = 0
    for row, (queries, context) in enumerate(zip(QUERIES, CONTEXTS, strict=True)):
        first = max(0, context - queries - reach) // size
        for block in batch.block_tables[row, :first].tolist():
            for each in cache.by_block:
                each[block] = torch.nan
            count += 1
    return count


@pytest.mark.parametrize("window", [1, 130])
@pytest.mark.parametrize(("name", "dtype", "deterministic"), KINDS, ids=str)
def test_what_is_behind_the_reach_changes_no_bit(
    name: str, dtype: torch.dtype, deterministic: bool, window: int
) -> None:
    torch.manual_seed(window)
    kernels = kernels_of(name, dtype, deterministic=deterministic)
    is_on_gpu = name == "triton" and torch.cuda.is_available()
    device = torch.device("cuda" if is_on_gpu else "cpu")
    batch, cache = filled(kernels, dtype, device)
    queries = torch.randn(sum(QUERIES), HEADS, DIM, device=device).to(dtype)

    def attend() -> Tensor:
        return kernels.attend(queries, batch, cache, scale=0.3, window=window)

    expected = attend()
    num_blocks = poison_behind(cache, batch, window_reach(kernels, window), kernels.block_size)
    assert num_blocks * kernels.block_size > sum(CONTEXTS) // 4
    assert torch.equal(attend(), expected)
