"""torch's attention over sequences of different lengths, for prompts in fast mode: FlashAttention-2 in every wheel.

Its pages would have to be of 256 positions, so keys and values are copied out of their blocks first. A copy has the
bytes of one layer, and pays where there are about as many keys as queries: for prompts, not for the last part of a long
one. Single queries of the same step stay with the kernels that split their keys over spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace_shard.device.transfers import upload
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.ragged import RaggedBatch

DTYPES = (torch.bfloat16, torch.float16)
LEAST_QUERIES = 64
"""Of a step's prompts: with fewer, the copies and launches take longer than the products."""
MOST_KEYS_PER_QUERY = 2
"""Keys that are copied for each query of a step's prompts, at most."""
WIDTHS = 8
"""Channels of heads are a multiple of it."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which tokens and keys of a step belong to its sequences of several queries, for all layers of one window."""

    tokens: Tensor
    """[queries] int64."""
    rows: Tensor
    """[keys] int64, cache rows."""
    query_starts: Tensor
    """[sequences + 1] int32."""
    key_starts: Tensor
    """[sequences + 1] int32."""
    most_queries: int
    """Of a sequence."""
    most_keys: int


class VarlenAttention:
    """Attention of a step's sequences of several queries."""

    def __init__(self) -> None:
        """Raises ImportError where torch has no such operator."""
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

        # Without further results to return, it returns one tensor.
        self._attend: Callable[..., Any] = varlen_attn
        self._plans: tuple[RaggedBatch, dict[int | None, _Plan]] | None = None

    def takes(self, queries: Tensor, batch: RaggedBatch, window: int | None) -> bool:
        """Whether the operator has the shapes of `queries` [T, H, head_dim], and the step is worth the copies."""
        if queries.dtype not in DTYPES or queries.shape[2] % WIDTHS:
            return False
        counts = [count for count in batch.num_queries if count > 1]
        num_keys = sum(
            context - _first_key(count, context, window)
            for count, context in zip(batch.num_queries, batch.num_context, strict=True)
            if count > 1
        )
        return sum(counts) >= LEAST_QUERIES and num_keys <= MOST_KEYS_PER_QUERY * sum(counts)

    def __call__(
        self,
        out: Tensor,
        queries: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        """Overwrite the rows of `out` [T, H * head_dim] that belong to sequences of several queries."""
        plan = self._plan(batch, cache, window)
        num_heads, head_dim = queries.shape[1:]
        num_kv_heads = cache.keys.shape[2]
        keys, values = (
            pages.view(-1, num_kv_heads, head_dim).index_select(0, plan.rows)
            for pages in (cache.keys, cache.values)
        )
        attended = self._attend(
            queries.index_select(0, plan.tokens),
            keys,
            values,
            plan.query_starts,
            plan.key_starts,
            plan.most_queries,
            plan.most_keys,
            scale=scale,
            # Both ends exclude the query; it sees nothing after itself.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=num_heads != num_kv_heads,
        )
        out.index_copy_(0, plan.tokens, attended.flatten(1))

    def _plan(self, batch: RaggedBatch, cache: LayerCache, window: int | None) -> _Plan:
        """All layers of a step have the same batch, so that its rows are computed once for each window."""
        if self._plans is None or self._plans[0] is not batch:
            self._plans = batch, {}
        plans = self._plans[1]
        if window not in plans:
            plans[window] = _planned(batch, cache.keys.shape[1], window)
        return plans[window]


def _first_key(count: int, context: int, window: int | None) -> int:
    """The first position that any of the last `count` queries of a context sees."""
    return 0 if window is None else max(0, context - count - window + 1)


def _planned(batch: RaggedBatch, block_size: int, window: int | None) -> _Plan:
    """Without waiting for the device: sizes follow from what the host knows."""
    starts = (0, *accumulate(batch.num_queries))
    own = [b for b, count in enumerate(batch.num_queries) if count > 1]
    counts = [batch.num_queries[b] for b in own]
    firsts = [_first_key(batch.num_queries[b], batch.num_context[b], window) for b in own]
    lengths = [batch.num_context[b] - first for b, first in zip(own, firsts, strict=True)]
    key_starts, query_starts = ((0, *accumulate(each)) for each in (lengths, counts))
    columns = (
        own,
        lengths,
        # What to add to a key's number among all, for its position.
        [first - start for first, start in zip(firsts, key_starts, strict=False)],
        counts,
        [starts[b] - start for b, start in zip(own, query_starts, strict=False)],
    )
    device = batch.block_tables.device
    sequences, num_keys, shifts, num_queries, offsets = upload(
        np.array(columns, dtype=np.int64), device
    )
    each = torch.arange(len(own), device=device)
    of_key = each.repeat_interleave(num_keys, output_size=key_starts[-1])
    of_query = each.repeat_interleave(num_queries, output_size=query_starts[-1])
    at = torch.arange(key_starts[-1], device=device) + shifts[of_key]
    blocks = batch.block_tables[sequences[of_key], at // block_size]
    edges = upload(np.array((query_starts, key_starts), dtype=np.int32), device)
    return _Plan(
        tokens=torch.arange(query_starts[-1], device=device) + offsets[of_query],
        rows=blocks.long() * block_size + at % block_size,
        query_starts=edges[0],
        key_starts=edges[1],
        most_queries=max(counts),
        most_keys=max(lengths),
    )
