"""CudaKernels with FlashAttention-3 for prompts, if its package `flash_attn_interface` is installed.

FlashAttention-3 is written for Hopper GPUs. Steps of single queries, and layers with sinks, use the Triton kernels,
which may be captured in graphs; the package does not document whether its kernels may. It splits keys by the size of
the batch, so a row's bits may depend on the composition of the batch, and deterministic mode does not use it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from millrace_shard.device.transfers import upload
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.cuda import triton_pages
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.ragged import RaggedBatch

FLASH = "flash_attn_3"
"""The name among a model's operators."""
DTYPES = (torch.bfloat16, torch.float16)
MOST_LISTS = 16
"""Lists of addresses that are kept: a model has one for each kind of layer, and a draft model has its own."""


class FlashKernels(CudaKernels):
    """CudaKernels with FlashAttention-3 in every step that has a sequence of several queries."""

    name = "flash-attn"
    # No tile of the package is larger, and 176 of some does not divide it.
    key_tile = 256

    def __init__(self, operators: Collection[str] = ()) -> None:
        """Raises ImportError if the package or its library is missing, AttributeError for an unknown version."""
        super().__init__(deterministic=False, operators=operators)
        self.operators = (FLASH, *self.operators)
        module = importlib.import_module("flash_attn_interface")
        self._attend: Callable[..., Tensor] = module.flash_attn_with_kvcache
        self._addresses: dict[tuple[int, ...], Tensor] = {}

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Zero `blocks`, since the package does not document whether it reads past the end of a sequence."""
        cache.keys.index_fill_(0, blocks, 0)
        cache.values.index_fill_(0, blocks, 0)

    def zero_layers(self, layers: Sequence[LayerCache], blocks: Sequence[Tensor]) -> None:
        """As `zero_blocks` for each layer, in one launch for those whose blocks are alike."""
        alike: dict[tuple[int, int], list[int]] = {}
        for layer in layers:
            for pages in (layer.keys, layer.values):
                size = pages[0].nbytes if len(pages) else 0
                alike.setdefault((layer.group, size), []).append(pages.data_ptr())
        for (group, size), addresses in alike.items():
            triton_pages.zero_pages(self._on(blocks[group].device, addresses), blocks[group], size)

    def _on(self, device: torch.device, addresses: list[int]) -> Tensor:
        """Addresses of caches on the device, which are the same from step to step."""
        key = tuple(addresses)
        if key not in self._addresses:
            # Those of an earlier warm-up are never used again.
            if len(self._addresses) >= MOST_LISTS:
                self._addresses.clear()
            self._addresses[key] = upload(np.array(addresses, dtype=np.int64), device)
        return self._addresses[key]

    def zero_rows(self, cache: LayerCache, rows: Tensor, dtype: torch.dtype) -> None:  # noqa: ARG002
        """Zero `rows`, for the same reason."""
        for pages in (cache.keys, cache.values):
            pages.view(-1, *pages.shape[2:]).index_fill_(0, rows, 0)

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
        if longest == 1 or sinks is not None or batch.key_ends is not None:
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
