"""The warm-up: finds the KV capacity, allocates the cache, and runs the largest prefill once."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from millrace_shard.adapters.pages import PAGE_BYTES
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.batch_limits import BatchLimits
from millrace_shard.batch.forced_token_budget import CPU_TILE
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.resources import available_memory, free_cuda_memory
from millrace_shard.engine.adapter_memory import AdapterMemory, reserve_adapter_pages
from millrace_shard.engine.kv_capacity import (
    Capacity,
    CapacityError,
    KVMemory,
    WarmupRequest,
    blocks_in,
    cpu_memory,
    cuda_memory,
    plan_capacity,
    spread_prefill,
)
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.profile_run import (
    LongestDecode,
    batch_too_large,
    cache_too_large,
    contexts_too_long,
    prefill_too_large,
    run_largest,
)
from millrace_shard.kernels.base import LayerCache
from millrace_shard.model_runner.decode_graphs import DecodeGraphs
from millrace_shard.model_runner.graph_settings import GraphSettings, empty_cache
from millrace_shard.model_runner.piecewise_layers import with_pieces
from millrace_shard.model_runner.runner import DecodingFeatures, StepRunner

logger = logging.getLogger(__name__)

PROFILE_LAYERS = 2
"""Layers that run the largest prefill on CPU, where all layers of a large model would take minutes.

There are two, because the first layer takes less memory than the others: it has no earlier output to add.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Memory that the operator allows for this shard."""

    kv_memory: int | None = None
    cuda_memory_fraction: float = 1.0
    adapters: AdapterMemory = field(default_factory=AdapterMemory)


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """A runner with its final cache, and the capacity of this cache."""

    runner: StepRunner
    capacity: Capacity


def warm_up(
    loaded: LoadedModel,
    request: WarmupRequest,
    limits: MemoryLimits,
    *,
    profile: bool | None = None,
    graphs: GraphSettings | None = None,
) -> WarmedUp:
    """Warm up in a collective: every rank calls this at the same time, and all agree on the capacity.

    With `profile`, which is the default on CUDA, the largest steps run before memory is measured. Otherwise the largest
    prefill runs on a few layers after the cache is allocated, unless the request has the number of blocks of an
    earlier group: this size fitted then, and requests are waiting. `graphs` are captured if kernels and model support
    it, in the profile run too, since their memory counts. Every earlier cache must be gone.

    Raises CapacityError.
    """
    shape = loaded.cache_shape()
    if profile is None:
        profile = loaded.device.type == "cuda"
    graphs = _usable(graphs, loaded)
    adapter_pages = reserve_adapter_pages(loaded, request, limits.adapters, graphs)
    is_reserved = loaded.adapters is not None and loaded.adapters.reserves
    adapter_bytes = 0 if is_reserved else adapter_pages * PAGE_BYTES
    memory = (
        _memory_after_profile_run(loaded, request, limits, graphs, adapter_bytes)
        if profile
        else _kv_memory(loaded.device, limits, -adapter_bytes)
    )
    fitting = loaded.group.minimum(blocks_in(memory.for_request(request), shape))
    gc.collect()
    empty_cache(loaded.device, graphs)
    capacity = plan_capacity(request, shape, fitting_blocks=fitting, is_budget=memory.is_budget)
    capacity = replace(capacity, adapter_pages=adapter_pages)
    with _memory_or(cache_too_large(capacity.max_batch_total_tokens)):
        runner = _new_runner(
            loaded,
            max_batch_size=request.max_batch_size,
            max_tokens=capacity.max_total_tokens,
            num_blocks=capacity.num_blocks,
            graphs=graphs,
        )
    if not profile and request.num_blocks is None:
        _run_largest_prefill(loaded, request, capacity)
    return WarmedUp(runner, capacity)


def _run_largest_prefill(loaded: LoadedModel, request: WarmupRequest, capacity: Capacity) -> None:
    lengths = spread_prefill(
        request.max_batch_prefill_tokens,
        max_rows=request.max_batch_size,
        longest=capacity.max_input_tokens,
        num_blocks=capacity.num_blocks - 1,
        block_size=capacity.block_size,
    )
    with _memory_or(prefill_too_large(sum(lengths))):
        runner = _new_runner(
            loaded.first_layers(PROFILE_LAYERS),
            max_batch_size=request.max_batch_size,
            max_tokens=capacity.max_total_tokens,
            num_blocks=1 + sum(-(-length // capacity.block_size) for length in lengths),
            graphs=None,
        )
        run_largest(runner, lengths)


def _kv_memory(device: torch.device, limits: MemoryLimits, extra_bytes: int) -> KVMemory:
    """The memory for the KV cache, if `extra_bytes` are free beside those that are, or fewer for a negative number."""
    if device.type == "cuda":
        free, total = free_cuda_memory(device)
        return cuda_memory(
            free=max(0, free + extra_bytes),
            total=total,
            fraction=limits.cuda_memory_fraction,
            kv_memory=limits.kv_memory,
        )
    available = max(0, available_memory() + extra_bytes)
    return cpu_memory(available=available, kv_memory=limits.kv_memory)


def _usable(graphs: GraphSettings | None, loaded: LoadedModel) -> GraphSettings | None:
    if graphs is None or graphs.capture_failed:
        return None
    if not loaded.kernels.capturable:
        logger.warning("running without CUDA graphs, which plain torch kernels do not support")
        return None
    info = loaded.model.info
    if not info.capturable:
        logger.warning(
            "running without CUDA graphs, which have not been tested with the class of %s",
            info.model_type,
        )
        return None
    return graphs


def _memory_after_profile_run(
    loaded: LoadedModel,
    request: WarmupRequest,
    limits: MemoryLimits,
    graphs: GraphSettings | None,
    adapter_bytes: int,
) -> KVMemory:
    """Memory for the KV cache beside that of graphs, the largest prefill and the largest decodes, which run here.

    Their memory stays in torch's allocator when the rest is measured. The cache of this run counts as free if torch can
    release it.
    """
    positions = loaded.model.info.max_position_embeddings
    max_tokens = min(request.max_total_tokens or positions, positions)
    longest = min(request.max_input_tokens or max_tokens, max_tokens - 1)
    shape = loaded.cache_shape()
    lengths = spread_prefill(
        request.max_batch_prefill_tokens,
        max_rows=request.max_batch_size,
        longest=longest,
        num_blocks=request.max_batch_prefill_tokens,
        block_size=shape.block_size,
    )
    num_blocks = 1 + sum(-(-length // shape.block_size) for length in lengths)
    longest_decode = LongestDecode(
        num_rows=request.max_batch_size,
        max_tokens=max_tokens,
        block_size=shape.block_size,
        max_drafts=loaded.max_draft_tokens,
    )
    num_blocks = max(num_blocks, longest_decode.num_blocks)
    with _memory_or(prefill_too_large(sum(lengths))):
        runner = _new_runner(
            loaded,
            max_batch_size=request.max_batch_size,
            max_tokens=max_tokens,
            num_blocks=num_blocks,
            graphs=graphs,
        )
        run_largest(runner, lengths)
    # Prompts of one token sample as many rows at once as decodes do.
    with _memory_or(batch_too_large(request.max_batch_size)):
        run_largest(runner, [1] * request.max_batch_size, decode=True)
    with _memory_or(contexts_too_long(request.max_batch_size, max_tokens)):
        longest_decode.run(runner)
    holds_cache = graphs is not None and graphs.holds_cache
    trial_bytes = 0 if holds_cache else num_blocks * shape.block_size * shape.bytes_per_token
    return _kv_memory(loaded.device, limits, trial_bytes - adapter_bytes)


@contextmanager
def _memory_or(too_large: CapacityError) -> Iterator[None]:
    """Raise `too_large` if the block runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise too_large from error


def _new_runner(
    loaded: LoadedModel,
    *,
    max_batch_size: int,
    max_tokens: int,
    num_blocks: int,
    graphs: GraphSettings | None,
) -> StepRunner:
    """A runner with a new cache; graphs get an extra block for padding, behind the blocks of the router."""
    # Block 0 pads short block tables: it is never written, and read only with a weight of zero.
    unowned = [0] if graphs is None else [0, num_blocks]
    cache = _new_cache(loaded, num_blocks=num_blocks - 1 + len(unowned), unowned=unowned)
    limits = BatchLimits(
        max_batch_size=max_batch_size,
        max_tokens=max_tokens,
        num_blocks=num_blocks,
        block_size=loaded.kernels.block_size,
        vocab_size=loaded.model.info.vocab_size,
        padding_block=0 if graphs is None else num_blocks,
        max_draft_tokens=loaded.max_draft_tokens,
        row_tile=CPU_TILE if loaded.device.type == "cpu" else 1,
    )
    adapters = None if loaded.adapters is None else loaded.adapters.table
    batch = Batch(limits, loaded.device, adapters)
    own = len(loaded.model.geometry.layers)
    cache, draft_cache = cache[:own], cache[own:]
    model, captured = loaded.model, None
    if graphs is not None:
        captured = DecodeGraphs(model, loaded.kernels, cache, batch)
        captured.capture(graphs, loaded.group)
        model = with_pieces(model, loaded.kernels, cache, batch, graphs, loaded.group)
    proposer = None
    if loaded.speculation is not None:
        proposer = loaded.speculation.proposer(
            model, loaded.kernels, draft_cache, batch, loaded.dtype
        )
    return StepRunner(
        model,
        loaded.kernels,
        cache,
        batch,
        captured,
        DecodingFeatures(grammars=loaded.grammars, proposer=proposer, watermark=loaded.watermark),
    )


def _new_cache(loaded: LoadedModel, *, num_blocks: int, unowned: list[int]) -> list[LayerCache]:
    """The cache of each layer, with zeros in the `unowned` blocks."""
    cache = [
        loaded.kernels.new_cache(
            num_blocks=num_blocks,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=loaded.kv_dtype,
            device=loaded.device,
            scales=layer.scales,
        )
        for layer in loaded.layers
    ]
    reserved = torch.tensor(unowned, dtype=torch.int64, device=loaded.device)
    for each in cache:
        loaded.kernels.zero_blocks(each, reserved)
    return cache
