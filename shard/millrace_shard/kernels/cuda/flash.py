"""CudaKernels that attend prompts by FlashAttention-3, where its package `flash_attn_interface` is installed.

An option for Hopper GPUs, which it is written for. Steps of single queries alone stay with Triton's kernels, which
may be captured in graphs: of the package nothing is documented there. It chooses how to split keys by the size of the
batch, so a row's bits may depend on its batch mates: never used in deterministic mode.
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
    """The same caches; all but the attention of prompts and of what runs beside them is CudaKernels'."""

    name = "flash-attn"

    def __init__(self) -> None:
        """Raises ImportError when the package or its library is not there, AttributeError when it is another."""
        super().__init__(deterministic=False)
        module = importlib.import_module("flash_attn_interface")
        self._attend: Callable[..., Tensor] = module.flash_attn_with_kvcache

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Clear `blocks`: nothing is documented of what lies beyond a sequence's end."""
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
    ) -> Tensor:
        """Causal attention of `queries` [T, num_heads, head_dim]: [T, num_heads * head_dim]."""
        longest = max(batch.num_queries)
        if longest == 1:
            return super().attend(
                queries, batch, cache, scale=scale, window=window, softcap=softcap
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
            # Theirs counts the keys before a query, ours the query as well.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return attended.flatten(1)
