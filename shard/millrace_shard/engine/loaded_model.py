"""A loaded model of one rank, with everything that runs it, and the memory of its adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.adapters.arena import PAGE_BYTES
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.resources import available_memory, free_cuda_memory
from millrace_shard.engine.kv_capacity import CacheShape, CapacityError, WarmupRequest
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.kv_cache import head_bytes
from millrace_shard.model_runner.graph_capture import GraphSettings, empty_cache
from millrace_shard.models.interface import CausalModel, KVLayer
from millrace_shard.sampling.watermark import Watermark
from millrace_shard.speculation.loading import Speculation
from millrace_shard.structured_output.manager import GrammarManager


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """The model, its kernels and process group, and the optional parts of decoding."""

    model: CausalModel
    kernels: Kernels
    group: ProcessGroup
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None
    """The dtype of keys and values in the cache; None: `dtype`."""
    speculation: Speculation | None = None
    """None: there are no draft tokens."""
    grammars: GrammarManager | None = None
    """None: a sequence with a grammar fails."""
    watermark: Watermark | None = None
    adapters: AdapterStore | None = None
    """None: a sequence with an adapter fails."""

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens of one sequence in one step."""
        return 0 if self.speculation is None else self.speculation.max_draft_tokens

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of keys and values in the cache."""
        return self.cache_dtype or self.dtype

    @property
    def layers(self) -> tuple[KVLayer, ...]:
        """Each layer with a KV cache; the draft model's layers are last."""
        drafts = () if self.speculation is None else self.speculation.layers
        return (*self.model.geometry.layers, *drafts)

    def first_layers(self, count: int) -> LoadedModel:
        """The same with at most `count` layers of the model, and of the draft model."""
        speculation = self.speculation
        if speculation is not None and speculation.draft is not None:
            speculation = replace(speculation, draft=speculation.draft.first_layers(count))
        return replace(self, model=self.model.first_layers(count), speculation=speculation)

    def cache_shape(self) -> CacheShape:
        """The cost of a block of this rank's KV caches."""
        num_bytes = sum(
            2 * layer.num_kv_heads * head_bytes(layer.head_dim, self.kv_dtype)
            for layer in self.layers
        )
        return CacheShape(
            block_size=self.kernels.block_size,
            bytes_per_token=num_bytes,
            max_position_embeddings=self.model.info.max_position_embeddings,
        )

    def drop_adapters(self) -> None:
        """Empty all adapter slots: a router that has just started does not know what an earlier one loaded."""
        if self.adapters is not None:
            self.adapters.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMemory:
    """Memory that the operator allows for the adapters of this shard."""

    bytes: int | None = None
    fraction: float = 0.1
    """Part of the free memory of the device, without `bytes`."""


def reserve_adapter_pages(
    loaded: LoadedModel,
    request: WarmupRequest,
    memory: AdapterMemory,
    graphs: GraphSettings | None,
) -> int:
    """Drop all adapters and reserve memory for `request`; returns the pages. A collective if there are adapters.

    Either the memory of the pages is reserved, or the pages are counted, and allocated with each adapter. Raises
    CapacityError.
    """
    if loaded.adapters is None:
        return 0
    loaded.adapters.resize(0, 0)
    empty_cache(loaded.device, graphs)
    pages = 0
    if request.adapter_pages is not None:
        pages = request.adapter_pages
    elif request.max_adapters:
        pages = loaded.group.minimum(_bytes(loaded, memory) // PAGE_BYTES)
    try:
        loaded.adapters.resize(request.max_adapters, pages)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(f"Not enough memory for {pages} pages of adapters") from error
    return pages


def _bytes(loaded: LoadedModel, memory: AdapterMemory) -> int:
    if memory.bytes is not None:
        return memory.bytes
    if loaded.device.type == "cuda":
        free, _ = free_cuda_memory(loaded.device)
        return int(free * memory.fraction)
    return int(available_memory() * memory.fraction)
