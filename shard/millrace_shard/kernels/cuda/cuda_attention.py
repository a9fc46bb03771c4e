"""Launches ragged paged attention without transfers or waits; grids depend only on shapes, for CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.cuda.triton_attention import attend_spans, attend_tiles, fold_spans
from millrace_shard.kernels.cuda.triton_codes import kind_of_codes, stored
from millrace_shard.kernels.cuda.triton_softmax import (
    LONG_SPAN,
    MIDDLE_SPAN,
    NUM_MIDDLE_SPANS,
    NUM_SHORT_SPANS,
    SHORT_SPAN,
)
from millrace_shard.kernels.cuda.varlen_attention import VarlenAttention
from millrace_shard.kernels.ragged import RaggedBatch

PROGRAMS = 4096
"""Programs that share the spans of all single queries: several waves over the multiprocessors of any GPU."""
LEAST_SHARED_BYTES = 101376
"""Shared memory per thread block on GPUs of compute capability 8.6, 8.9 and 12.0, which have the least."""
WEIGHT_BYTES = 4
"""Of a key's weight at most."""
MIN_ROWS = 16
"""Rows of the smallest matrix product of the tensor cores."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The shared memory of a thread block on a GPU of a compute capability."""

    num_bytes: int
    capability: tuple[int, int]

    @property
    def free_stages(self) -> int:
        """Stages of a loop that need no buffer: one where tensor cores take their operands from registers."""
        return int(self.capability[0] not in (9, 10, 11))


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile sizes of a program; the results of two tilings may differ in their last bits."""

    rows: int
    """Queries times heads of a group."""
    chunk: int
    """Keys per iteration; divides SHORT_SPAN."""
    num_warps: int
    num_stages: int

    def fitted(self, group: int, head_bytes: int, memory: SharedMemory) -> Tiling:
        """The tiling adjusted to hold a query of `group` heads, and at least two stages."""
        least = max(MIN_ROWS, triton.next_power_of_2(group))
        stage = 2 * self.chunk * head_bytes
        rows = max(self.rows, least)
        while rows > least and rows * head_bytes + 2 * stage > memory.num_bytes:
            rows //= 2
        # Where warps share rows, the weights of a chunk go from one to another through shared memory.
        weights = rows * self.chunk * WEIGHT_BYTES if self.num_warps * MIN_ROWS > rows else 0
        stages = (memory.num_bytes - rows * head_bytes - weights) // stage + memory.free_stages
        return Tiling(rows, self.chunk, self.num_warps, max(2, min(self.num_stages, stages)))


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Scale, window, soft cap and sinks, which turn products of queries and keys into attention weights."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None
    """[H] float32."""


def tile_tiling(dtype: torch.dtype, head_dim: int) -> Tiling:
    """The tiling for sequences of several queries."""
    if dtype == torch.float32:
        return Tiling(rows=32, chunk=16, num_warps=8, num_stages=2)
    if head_dim > 128:
        return Tiling(rows=128, chunk=32, num_warps=8, num_stages=2)
    return Tiling(rows=128, chunk=64, num_warps=8, num_stages=3)


def coded_tile_tiling(dtype: torch.dtype, head_dim: int) -> Tiling:
    """The same over codes, whose numbers take registers: longer chunks and more rows of wide heads would spill them."""
    tiling = tile_tiling(dtype, head_dim)
    rows = min(tiling.rows, 64) if head_dim > 128 else tiling.rows
    return replace(tiling, rows=rows, chunk=min(tiling.chunk, 32))


def span_tiling(dtype: torch.dtype, head_dim: int) -> Tiling:
    """The tiling for single queries, which are bound by bandwidth."""
    if dtype == torch.float32 or head_dim > 128:
        return Tiling(rows=MIN_ROWS, chunk=32, num_warps=4, num_stages=3)
    return Tiling(rows=MIN_ROWS, chunk=64, num_warps=4, num_stages=3)


def fixed_tiling(dtype: torch.dtype, head_dim: int, *, is_coded: bool = False) -> Tiling:
    """The tiling of deterministic mode: wide enough for prompts, narrow enough for single queries."""
    if dtype == torch.float32:
        return Tiling(rows=MIN_ROWS, chunk=32, num_warps=4, num_stages=2)
    if head_dim > 128:
        # The numbers of codes take registers, which a third stage would spill.
        return Tiling(rows=64, chunk=32, num_warps=8, num_stages=2 if is_coded else 3)
    # More warps than rows / 16 would repeat one another's products; longer chunks would spill registers.
    return Tiling(rows=64, chunk=32, num_warps=4, num_stages=3)


def max_spans(num_keys: int) -> int:
    """The number of spans that contain `num_keys` positions."""
    short = min(num_keys, NUM_SHORT_SPANS * SHORT_SPAN)
    middle = min(num_keys - short, NUM_MIDDLE_SPANS * MIDDLE_SPAN)
    parts = (short, SHORT_SPAN), (middle, MIDDLE_SPAN), (num_keys - short - middle, LONG_SPAN)
    return sum(-(-keys // size) for keys, size in parts)


class Spans(NamedTuple):
    """What single queries get from each span of keys, which `fold` adds up; queries of longer sequences have none."""

    partials: Tensor
    """[B, H, spans, channels] float32."""
    tops: Tensor
    """[B, H, spans] float32."""
    totals: Tensor
    """[B, H, spans] float32."""

    @classmethod
    def new(cls, queries: Tensor, batch: RaggedBatch, cache: LayerCache, channels: int) -> Spans:
        """Uninitialised, for `queries` [T, H, head_dim] and values of `channels`."""
        num_sequences, width = batch.block_tables.shape
        shape = num_sequences, queries.shape[1], max_spans(width * cache.keys.shape[1])
        sizes: tuple[tuple[int, ...], ...] = ((channels,), (), ())
        return cls(*(queries.new_empty(*shape, *each, dtype=torch.float32) for each in sizes))

    def grid(self, tiles: int) -> tuple[int, int, int]:
        """Sequences, `tiles` of heads of each, and programs that share the spans of a tile."""
        num_sequences, _, num_spans = self.tops.shape
        return num_sequences, tiles, max(1, min(num_spans, PROGRAMS // (num_sequences * tiles)))

    def fold(
        self,
        out: Tensor,
        batch: RaggedBatch,
        chunk: int,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Write the rows of single queries to `out` [T, H * channels]; `chunk` is the tiling's."""
        num_sequences, num_heads, num_spans, channels = self.partials.shape
        fold_spans[(num_sequences, num_heads)](
            out,
            *self,
            batch.query_starts,
            batch.context_lengths,
            window or 0,
            out if sinks is None else sinks,
            num_spans,
            num_heads=num_heads,
            head_dim=channels,
            chunk=chunk,
            has_window=window is not None,
            has_sinks=sinks is not None,
            num_warps=1,
        )


class PagedAttention:
    """Attention of one step's queries over one layer's cache [num_blocks, block_size, K, head_dim]."""

    def __init__(self, *, deterministic: bool, varlen: VarlenAttention | None = None) -> None:
        """If deterministic, all queries use one tiling, so that a row has the same bits in a prompt and alone.

        `varlen` computes the prompts that it takes.
        """
        self._deterministic = deterministic
        self._varlen = varlen

    def __call__(
        self, queries: Tensor, batch: RaggedBatch, cache: LayerCache, rule: AttentionRule
    ) -> Tensor:
        """Attend with `queries` [T, H, head_dim], whose last axis is contiguous: [T, H * head_dim]."""
        out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
        num_singles = batch.num_queries.count(1)
        if num_singles < len(batch.num_queries):
            varlen = self._varlen
            is_plain = rule.softcap is None and rule.sinks is None and cache.scales is None
            if varlen is not None and is_plain and varlen.takes(queries, batch, rule.window):
                varlen(out, queries, batch, cache, scale=rule.scale, window=rule.window)
            else:
                self._tiles(out, queries, batch, cache, rule)
        if num_singles:
            self._spans(out, queries, batch, cache, rule)
        return out

    def _tiling(
        self, choose: Callable[[torch.dtype, int], Tiling], queries: Tensor, cache: LayerCache
    ) -> Tiling:
        _, num_heads, head_dim = queries.shape
        if self._deterministic:
            is_coded = cache.scales is not None
            tiling = fixed_tiling(queries.dtype, head_dim, is_coded=is_coded)
        else:
            tiling = choose(queries.dtype, head_dim)
        return tiling.fitted(
            num_heads // cache.keys.shape[2],
            triton.next_power_of_2(head_dim) * queries.element_size(),
            shared_memory(queries.device),
        )

    def _tiles(
        self,
        out: Tensor,
        queries: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        rule: AttentionRule,
    ) -> None:
        num_tokens, num_heads, _ = queries.shape
        num_kv_heads = cache.keys.shape[2]
        choose = tile_tiling if cache.scales is None else coded_tile_tiling
        tiling = self._tiling(choose, queries, cache)
        tokens_per_tile = tiling.rows // (num_heads // num_kv_heads)
        num_sequences = len(batch.num_queries)
        attend_tiles[(num_tokens // tokens_per_tile + num_sequences, num_kv_heads)](
            out,
            *_inputs(queries, batch, cache, rule),
            queries if rule.sinks is None else rule.sinks,
            batch.query_starts if batch.key_ends is None else batch.key_ends,
            num_sequences,
            *_strides(queries, batch, cache),
            has_sinks=rule.sinks is not None,
            has_ends=batch.key_ends is not None,
            in_spans=self._deterministic,
            **_constants(queries, cache, rule, tiling),
        )

    def _spans(
        self,
        out: Tensor,
        queries: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        rule: AttentionRule,
    ) -> None:
        tiling = self._tiling(span_tiling, queries, cache)
        spans = Spans.new(queries, batch, cache, queries.shape[2])
        attend_spans[spans.grid(cache.keys.shape[2])](
            *spans,
            *_inputs(queries, batch, cache, rule),
            spans.tops.shape[2],
            *_strides(queries, batch, cache),
            **_constants(queries, cache, rule, tiling),
        )
        spans.fold(out, batch, tiling.chunk, window=rule.window, sinks=rule.sinks)


@functools.cache
def shared_memory(device: torch.device) -> SharedMemory:
    """The most that a thread block may have; under Triton's interpreter, a Hopper GPU's."""
    if device.type != "cuda":
        return SharedMemory(232448, (9, 0))
    properties = torch.cuda.get_device_properties(device)
    num_bytes = int(getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_BYTES))
    return SharedMemory(num_bytes, (properties.major, properties.minor))


def _inputs(
    queries: Tensor, batch: RaggedBatch, cache: LayerCache, rule: AttentionRule
) -> tuple[Tensor | float, ...]:
    return (
        queries,
        *stored(cache),
        batch.block_tables,
        batch.query_starts,
        batch.context_lengths,
        float(rule.scale),
        float(rule.softcap or 0.0),
        rule.window or 0,
    )


def _strides(queries: Tensor, batch: RaggedBatch, cache: LayerCache) -> tuple[int, ...]:
    return (
        batch.block_tables.stride(0),
        *queries.stride()[:2],
        *cache.keys.stride()[:2],
    )


def _constants(
    queries: Tensor, cache: LayerCache, rule: AttentionRule, tiling: Tiling
) -> dict[str, int | bool | str]:
    return {
        "num_heads": queries.shape[1],
        "group": queries.shape[1] // cache.keys.shape[2],
        "head_dim": queries.shape[2],
        "page": cache.keys.shape[1],
        "rows": tiling.rows,
        "chunk": tiling.chunk,
        "has_window": rule.window is not None,
        "has_cap": rule.softcap is not None,
        "codes": kind_of_codes(cache),
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
