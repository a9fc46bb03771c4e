"""CudaKernels with FlashAttention-3 for prompts, if its package `flash_attn_interface` is installed.

FlashAttention-3 is written for Hopper GPUs. Steps of single queries, and layers with sinks, use the Triton kernels,
which may be captured in graphs; the package does not document whether its kernels may. It splits keys by the size of
the batch, so a row's bits may depend on the composition of the batch, and deterministic mode does not use it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.ragged import RaggedBatch

DTYPES = (torch.bfloat16, torch.float16)


class FlashKernels(CudaKernels):
    """CudaKernels with FlashAttention-3 in every step that has a sequence of several queries."""

    name = "flash-attn"

    def __init__(self) -> None:
        """Raises ImportError if the package or its library is missing, AttributeError for an unknown version."""
        super().__init__(deterministic=False)
        module = importlib.import_module("flash_attn_interface")
        self._attend: Callable[..., Tensor] = module.flash_attn_with_kvcache

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Zero `blocks`, since the package does not document whether it reads past the end of a sequence."""
        cache.keys.index_fill_(0, blocks, 0)
        cache.values.index_fill_(0, blocks, 0)

    def attend(
        self,
        queries: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of `queries` [T, num_heads, head_dim]: [T, num_heads * head_dim]."""
        longest = max(batch.num_queries)
        if longest == 1 or sinks is not None:
            return super().attend(
                queries, batch, cache, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
        attended = self._attend(
            queries,
            cache.keys,
            cache.values,
            cache_seqlens=batch.context_lengths,
            page_table=batch.block_tables,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=longest,
            softmax_scale=scale,
            causal=True,
            # The package counts the keys before a query; our window includes the query.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return attended.flatten(1)
