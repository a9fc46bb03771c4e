"""Launches attention over paged latents without transfers or waits; grids depend only on shapes, for CUDA graphs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.cuda.cuda_attention import (
    MIN_ROWS,
    WEIGHT_BYTES,
    SharedMemory,
    Spans,
    Tiling,
    shared_memory,
)
from millrace_shard.kernels.cuda.triton_latents import (
    LEAST_CHANNELS,
    attend_latent_spans,
    attend_latent_tiles,
)
from millrace_shard.kernels.ragged import RaggedBatch

MOST_LATENT, MOST_ROTATED = 512, 128
"""The most channels of a latent, and of a rotated key, whose sums and products fit into registers."""


def tile_tiling(dtype: torch.dtype) -> Tiling:
    """The tiling for sequences of several queries."""
    if dtype == torch.float32:
        return Tiling(rows=32, chunk=16, num_warps=8, num_stages=2)
    return Tiling(rows=64, chunk=32, num_warps=8, num_stages=2)


def span_tiling(dtype: torch.dtype, num_heads: int) -> Tiling:
    """The tiling for single queries: one tile has all heads of most models, so that each latent is read once."""
    if dtype == torch.float32:
        return Tiling(rows=MIN_ROWS, chunk=16, num_warps=8, num_stages=2)
    # More rows would spill their sums.
    rows = min(32, max(MIN_ROWS, triton.next_power_of_2(num_heads)))
    return Tiling(rows, chunk=32, num_warps=8, num_stages=3)


def fixed_tiling(dtype: torch.dtype) -> Tiling:
    """The tiling of deterministic mode: more rows would spill their sums, of which prompts hold two."""
    if dtype == torch.float32:
        return Tiling(rows=MIN_ROWS, chunk=16, num_warps=8, num_stages=2)
    return Tiling(rows=32, chunk=32, num_warps=8, num_stages=3)


def fitted(
    tiling: Tiling, widths: tuple[int, int], dtype: torch.dtype, memory: SharedMemory
) -> Tiling:
    """The tiling with as many rows and stages as `memory` holds; `widths` are channels of latents and rotated keys."""
    padded = (max(LEAST_CHANNELS, int(triton.next_power_of_2(width))) for width in widths)
    key_bytes = sum(padded) * dtype.itemsize
    stage, rows = tiling.chunk * key_bytes, tiling.rows

    def stages() -> int:
        taken = rows * (key_bytes + tiling.chunk * WEIGHT_BYTES)
        return (memory.num_bytes - taken) // stage + memory.free_stages

    while rows > MIN_ROWS and stages() < 2:
        rows //= 2
    return Tiling(rows, tiling.chunk, tiling.num_warps, max(1, min(tiling.num_stages, stages())))


class PagedLatentAttention:
    """Attention of one step's queries over one layer's latents [num_blocks, block_size, 1, latent_dim + rope_dim]."""

    def __init__(self, *, deterministic: bool) -> None:
        """If deterministic, all queries use one tiling, so that a row has the same bits in a prompt and alone."""
        self._deterministic = deterministic

    def __call__(
        self, queries: Tensor, batch: RaggedBatch, cache: LayerCache, scale: float
    ) -> Tensor:
        """Attend with `queries` [T, H, latent_dim + rope_dim], whose last axis is contiguous: [T, H * latent_dim].

        Raises ValueError for a batch whose queries see keys behind them.
        """
        assert cache.latent_dim is not None
        if batch.key_ends is not None:
            raise ValueError("attention over latents is causal, without ends of keys")
        out = queries.new_empty(len(queries), queries.shape[1] * cache.latent_dim)
        num_singles = batch.num_queries.count(1)
        if num_singles < len(batch.num_queries):
            self._tiles(out, queries, batch, cache, scale)
        if num_singles:
            self._spans(out, queries, batch, cache, scale)
        return out

    def _tiles(
        self, out: Tensor, queries: Tensor, batch: RaggedBatch, cache: LayerCache, scale: float
    ) -> None:
        constants = self._constants(tile_tiling(queries.dtype), queries, cache)
        num_sequences = len(batch.num_queries)
        num_slots = len(queries) * queries.shape[1] // constants["rows"] + num_sequences
        attend_latent_tiles[(num_slots,)](
            out,
            *_inputs(queries, batch, cache, scale),
            num_sequences,
            *_strides(queries, batch, cache),
            in_spans=self._deterministic,
            **constants,
        )

    def _spans(
        self, out: Tensor, queries: Tensor, batch: RaggedBatch, cache: LayerCache, scale: float
    ) -> None:
        assert cache.latent_dim is not None
        num_heads = queries.shape[1]
        constants = self._constants(span_tiling(queries.dtype, num_heads), queries, cache)
        spans = Spans.new(queries, batch, cache, cache.latent_dim)
        attend_latent_spans[spans.grid(triton.cdiv(num_heads, constants["rows"]))](
            *spans,
            *_inputs(queries, batch, cache, scale),
            spans.tops.shape[2],
            *_strides(queries, batch, cache),
            **constants,
        )
        spans.fold(out, batch, constants["chunk"])

    def _constants(self, fast: Tiling, queries: Tensor, cache: LayerCache) -> dict[str, int]:
        """Of the tiling, which is `fast` in fast mode."""
        assert cache.latent_dim is not None
        widths = cache.latent_dim, queries.shape[2] - cache.latent_dim
        chosen = fixed_tiling(queries.dtype) if self._deterministic else fast
        tiling = fitted(chosen, widths, queries.dtype, shared_memory(queries.device))
        return {
            "num_heads": queries.shape[1],
            "latent_dim": widths[0],
            "rope_dim": widths[1],
            "page": cache.keys.shape[1],
            "rows": tiling.rows,
            "chunk": tiling.chunk,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }


def _inputs(
    queries: Tensor, batch: RaggedBatch, cache: LayerCache, scale: float
) -> tuple[Tensor | float, ...]:
    return (
        queries,
        cache.keys,
        batch.block_tables,
        batch.query_starts,
        batch.context_lengths,
        float(scale),
    )


def _strides(queries: Tensor, batch: RaggedBatch, cache: LayerCache) -> tuple[int, ...]:
    return (batch.block_tables.stride(0), *queries.stride()[:2], *cache.keys.stride()[:2])
