"""The memory for adapters, which is set aside before the KV capacity is measured."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_shard.adapters.pages import PAGE_BYTES
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.resources import available_memory, free_cuda_memory
from millrace_shard.engine.kv_capacity import CapacityError, WarmupRequest
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.model_runner.graph_settings import GraphSettings, empty_cache


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
    """Drop all adapters and make room for those of `request`; returns the pages. A collective if there are adapters.

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
