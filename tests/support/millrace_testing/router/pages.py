"""Sequences of random keys, values and queries in pages laid out as `plain` does, among pages full of NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_testing.engines.kernels import SCALES, as_kept

Span = tuple[int, int, int]
"""(sequence, begin, end) of the queries of a row."""


@dataclass(frozen=True)
class Pages:
    """The last block of a sequence, and every block of none, holds NaN where nothing was stored."""

    kernels: Kernels
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    tables: Tensor
    cache: LayerCache

    @classmethod
    def random(
        cls,
        kernels: Kernels,
        contexts: Sequence[int],
        *,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> Pages:
        """`heads`: query heads, key-value heads, head_dim. Codes of `cache_dtype` have `SCALES`."""
        num_heads, num_kv_heads, dim = heads
        generator = torch.Generator().manual_seed(num_heads * dim)

        def random(length: int, count: int) -> Tensor:
            return torch.randn(length, count, dim, generator=generator).to(device, dtype)

        width = max(contexts) // kernels.block_size + 1
        order = torch.randperm(len(contexts) * width, generator=generator) + 1
        pages = cls(
            kernels=kernels,
            queries=[random(length, num_heads) for length in contexts],
            keys=[random(length, num_kv_heads) for length in contexts],
            values=[random(length, num_kv_heads) for length in contexts],
            tables=order.view(len(contexts), width).int(),
            cache=kernels.new_cache(
                num_blocks=len(order) + 1,
                num_kv_heads=num_kv_heads,
                head_dim=dim,
                dtype=cache_dtype or dtype,
                device=device,
                scales=SCALES,
            ),
        )
        for each in pages.cache.by_block:
            if each.itemsize == 1:
                # NaN in both formats of fp8; int8 has it in its scales.
                each.view(torch.uint8).fill_(0x7F)
            else:
                each.fill_(math.nan)
        whole = pages.batch([(b, 0, length) for b, length in enumerate(contexts)])
        PlainKernels(deterministic=True, block_size=kernels.block_size).store(
            torch.cat(pages.keys), torch.cat(pages.values), whole, pages.cache
        )
        for kept, scale in zip((pages.keys, pages.values), SCALES, strict=True):
            kept[:] = [as_kept(each, cache_dtype, scale) for each in kept]
        return pages

    def batch(self, spans: Sequence[Span]) -> RaggedBatch:
        device, size = self.queries[0].device, self.kernels.block_size
        positions = [torch.arange(begin, end) for _, begin, end in spans]
        tables = self.tables[[sequence for sequence, _, _ in spans]]
        counts = tuple(end - begin for _, begin, end in spans)
        starts = torch.tensor([0, *counts]).cumsum(0)
        cache_rows = [
            row[at // size].long() * size + at % size
            for row, at in zip(tables, positions, strict=True)
        ]
        return RaggedBatch(
            ids=torch.zeros(sum(counts), dtype=torch.int64, device=device),
            positions=torch.cat(positions).to(device),
            cache_rows=torch.cat(cache_rows).to(device),
            query_starts=starts.int().to(device),
            context_lengths=torch.tensor([end for *_, end in spans], dtype=torch.int32).to(device),
            block_tables=tables.to(device),
            logit_rows=(starts[1:] - 1).to(device),
            num_queries=counts,
            num_context=tuple(end for *_, end in spans),
        )

    def attend(
        self,
        spans: Sequence[Span],
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self.attend_batch(spans, self.batch(spans), window, softcap, sinks)

    def attend_batch(
        self,
        spans: Sequence[Span],
        batch: RaggedBatch,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The queries of `spans`, laid out as `batch` says."""
        queries = torch.cat([self.queries[b][begin:end] for b, begin, end in spans])
        return self.kernels.attend(
            queries,
            batch,
            self.cache,
            scale=queries.shape[-1] ** -0.5,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def expected(
        self,
        spans: Sequence[Span],
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention in float64, straight from its definition."""
        return torch.cat([self._expected(span, window, softcap, sinks) for span in spans])

    def _expected(
        self, span: Span, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        sequence, begin, end = span
        queries = self.queries[sequence][begin:end].double()
        group = queries.shape[1] // self.keys[sequence].shape[1]
        keys, values = (
            each[sequence][:end].double().repeat_interleave(group, dim=1)
            for each in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(queries.shape[-1])
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        at = torch.arange(end, device=queries.device)
        age = at[begin:, None] - at
        seen = (age >= 0) & (age < (window or end))
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            column = sinks.double().view(-1, 1, 1).expand(-1, len(scores[0]), 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1)[..., :end]
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
