"""The warm-up: finds the KV capacity by a profile run of the largest steps, allocates the cache, and runs a prefill."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from millrace_proto.sampling import Sampling
from millrace_shard.adapters.arena import PAGE_BYTES
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.device_tables import BatchLimits
from millrace_shard.batch.sequence import Ids
from millrace_shard.batch.sequence import Sequence as BatchSequence
from millrace_shard.batch.sequence_table import CPU_TILE
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.resources import (
    available_memory,
    free_cuda_memory,
    peak_memory,
    resident_memory,
)
from millrace_shard.engine.kv_capacity import (
    Capacity,
    CapacityError,
    KVMemory,
    WarmupRequest,
    batch_too_large,
    cache_too_large,
    contexts_too_long,
    cpu_memory,
    cuda_memory,
    longest_in,
    prefill_too_large,
    spread_prefill,
    total_too_large,
)
from millrace_shard.engine.loaded_model import AdapterMemory, LoadedModel, reserve_adapter_pages
from millrace_shard.kernels.build import warn_of_compilations
from millrace_shard.kernels.kept_results import kept_results
from millrace_shard.kernels.kv_store import KVStore
from millrace_shard.kernels.lora.adapter_table import PackedAdapter
from millrace_shard.model_runner.decode_graphs import DecodeGraphs
from millrace_shard.model_runner.draft_graphs import capture_drafts
from millrace_shard.model_runner.graph_capture import GraphSettings, empty_cache
from millrace_shard.model_runner.piecewise_layers import with_pieces
from millrace_shard.model_runner.runner import DecodingFeatures, StepRunner


def run_largest(
    runner: StepRunner, lengths: list[int], *, decode: bool = False, adapter_slot: int = 0
) -> None:
    """Run a step over prompts of these lengths that uses every part of sampling, then drop the sequences.

    They have the adapter in `adapter_slot`. With `decode` and speculative decoding, a step with all draft tokens
    follows. Raises any error of the device.
    """
    # Scores of prompts are slow on CPU; on CUDA they are fast, and their memory counts.
    scores = runner.batch.device.type == "cuda"
    size, max_drafts = runner.batch.limits.block_size, runner.batch.limits.max_draft_tokens
    decode = decode and max_drafts > 0
    room = 1 + max_drafts if decode else 0
    num_blocks = [-(-(length + room) // size) for length in lengths]
    slots = np.arange(len(lengths))
    prompts = Forward(
        change=BatchChange(
            admitted=tuple(
                replace(
                    _sequence(slot, np.zeros(length, dtype=np.int64)),
                    prefill_logprobs=scores,
                    adapter_slot=adapter_slot,
                )
                for slot, length in enumerate(lengths)
            ),
            grown_slots=np.repeat(slots, num_blocks),
            grown_blocks=np.arange(1, 1 + sum(num_blocks)),
        ),
        chunk_slots=slots,
        chunk_tokens=np.array(lengths, dtype=np.int64),
    )
    runner.launch(prompts).finish()
    if decode:
        drafting = Forward(
            decode_slots=slots,
            decode_tokens=np.full(len(slots), room),
            draft_tokens=np.full(len(slots), max_drafts),
        )
        runner.launch(drafting).finish()
    runner.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestDecode:
    """A decode in which every sequence of the batch has its greatest length, up to a part of a block.

    All positions but the last few lie in block 1, which the sequences share as they share a cached prefix: memory
    follows from the lengths and not from the values, so that no prompt is computed.
    """

    num_rows: int
    max_tokens: int
    block_size: int
    max_drafts: int

    @property
    def num_cached(self) -> int:
        """Tokens of each sequence in the shared block; one more token of the prompt is computed before the decode."""
        return max(0, self.max_tokens - 2 - self.max_drafts) // self.block_size * self.block_size

    @property
    def num_own_blocks(self) -> int:
        """Blocks of each sequence behind the shared ones."""
        return -(-(2 + self.max_drafts) // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache that the decode needs, with block 0."""
        return 2 + self.num_rows * self.num_own_blocks

    def run(self, runner: StepRunner) -> None:
        """Run a step with the last token of each prompt, then the decode; then drop the sequences.

        Both use every part of sampling. Raises any error of the device.
        """
        ids = np.zeros(self.num_cached + 1, dtype=np.int64)
        slots = np.arange(self.num_rows)
        for slot in slots.tolist():
            # One at a time, because the router never grows all tables by their whole length in one step.
            runner.launch(Forward(change=self._admission(slot, ids)))
        ones = np.ones(self.num_rows, dtype=np.int64)
        runner.launch(Forward(chunk_slots=slots, chunk_tokens=ones)).finish()
        decode = Forward(
            decode_slots=slots,
            decode_tokens=ones + self.max_drafts,
            draft_tokens=ones * self.max_drafts,
        )
        runner.launch(decode).finish()
        runner.clear()

    def _admission(self, slot: int, ids: Ids) -> BatchChange:
        shared = np.ones(self.num_cached // self.block_size, dtype=np.int64)
        own_blocks = 2 + slot * self.num_own_blocks + np.arange(self.num_own_blocks)
        blocks = np.concatenate([shared, own_blocks])
        return BatchChange(
            admitted=(replace(_sequence(slot, ids), cached_tokens=self.num_cached),),
            grown_slots=np.full(len(blocks), slot),
            grown_blocks=blocks,
        )


def _sequence(slot: int, ids: Ids) -> BatchSequence:
    """A sequence in `slot` that uses every part of sampling."""
    return BatchSequence(
        slot=slot,
        request_id=0,
        input_ids=ids,
        parameters=Sampling(
            temperature=0.9,
            top_k=10,
            top_p=0.9,
            typical_p=0.9,
            do_sample=True,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            # A repetition of the prompt, so that n-grams propose as many draft tokens as allowed.
            bias=((0, 1e9),),
        ),
        top_n_tokens=5,
        prefill_top_n_tokens=5,
        state_page=1 + slot,
    )


logger = logging.getLogger(__name__)

ID_BYTES = 8
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
    earlier group, which fitted then. `graphs` are captured if kernels and model support it, in the profile run too.
    Every earlier cache must be gone, but for one of the same layout in the KV store. Raises CapacityError.
    """
    warn_of_compilations(active=False)
    profile = loaded.device.type == "cuda" if profile is None else profile
    graphs = _usable(graphs, loaded)
    adapter_pages = reserve_adapter_pages(loaded, request, limits.adapters, graphs)
    is_reserved = loaded.adapters is not None and loaded.adapters.reserves
    adapter_bytes = 0 if is_reserved else adapter_pages * PAGE_BYTES
    memory = (
        _memory_after_profile_run(loaded, request, limits, graphs, adapter_bytes)
        if profile
        else _kv_memory(loaded.device, limits, _stored_bytes(loaded) - adapter_bytes)
    )
    gc.collect()
    empty_cache(loaded.device, graphs)
    capacity = replace(
        loaded.capacity_in(memory.for_request(request), request),
        adapter_pages=adapter_pages,
        has_kv_store=loaded.kv_store is not None,
    )
    with _memory_or(cache_too_large(capacity.max_batch_total_tokens)):
        runner = _new_runner(
            loaded,
            max_batch_size=request.max_batch_size,
            max_tokens=capacity.max_total_tokens,
            num_blocks=capacity.num_blocks,
            graphs=graphs,
            store=loaded.kv_store,
            windows={shape.window: count for shape, count in capacity.windows},
            state_pages=capacity.state_pages,
            feature_rows=capacity.feature_rows,
        )
    _log_windows(capacity)
    if not profile and request.num_blocks is None:
        _try_largest_prefill(loaded, request, capacity)
    warn_of_compilations(active=True)
    return WarmedUp(runner, capacity)


def _log_windows(capacity: Capacity) -> None:
    for group, count in capacity.windows:
        text = "%d layers with a window of %d positions have %d blocks, the others %d"
        logger.info(text, group.num_layers, group.window, count - 1, capacity.num_blocks - 1)


def _try_largest_prefill(loaded: LoadedModel, request: WarmupRequest, capacity: Capacity) -> None:
    """Run the largest prefill on a few layers, unless an earlier start did and what it took is free.

    A collective, because the layers are. Raises CapacityError.
    """
    lengths = spread_prefill(
        request.max_batch_prefill_tokens,
        max_rows=request.max_batch_size,
        longest=capacity.max_input_tokens,
        num_blocks=capacity.num_blocks - 1,
        block_size=capacity.block_size,
    )
    rows, longest = request.max_batch_size, capacity.max_total_tokens
    results, name = kept_results(), f"prefill {lengths} {rows} {longest} {loaded.identity}"
    known = results.get(name) if loaded.identity else None
    cache_bytes = capacity.num_bytes
    # The operating system has not yet provided the memory of the cache.
    fits = isinstance(known, int) and known <= available_memory() - cache_bytes
    if loaded.group.minimum(int(fits)):
        logger.debug("the largest prefill takes up to %d bytes, as at an earlier start", known)
        return
    resident = resident_memory()
    with _memory_or(prefill_too_large(sum(lengths))):
        runner = _new_runner(
            loaded.first_layers(PROFILE_LAYERS),
            max_batch_size=rows,
            max_tokens=longest,
            num_blocks=1 + sum(-(-length // capacity.block_size) for length in lengths),
            graphs=None,
        )
        run_largest(runner, lengths)
    if loaded.identity:
        results.put(name, max(0, peak_memory() - resident))


def _kv_memory(device: torch.device, limits: MemoryLimits, extra_bytes: int) -> KVMemory:
    """The memory for the KV cache if `extra_bytes` more were free than now; the number may be negative."""
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


def _stored_bytes(loaded: LoadedModel) -> int:
    """Memory that an earlier cache has in the store, where the new one takes its place."""
    return 0 if loaded.kv_store is None else loaded.kv_store.resident_bytes


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


def _longest(loaded: LoadedModel, memory: KVMemory, request: WarmupRequest) -> int:
    """Positions of the longest sequence of the profile run.

    Raises CapacityError if `max_total_tokens` are more, on all ranks: their rotary tables may be shorter.
    """
    shape = loaded.cache_shape()
    longest = loaded.group.minimum(longest_in(memory, request, shape))
    if longest < min(request.max_total_tokens or 0, shape.max_position_embeddings):
        raise total_too_large(request.max_total_tokens or 0, shape)
    return longest


def _memory_after_profile_run(
    loaded: LoadedModel,
    request: WarmupRequest,
    limits: MemoryLimits,
    graphs: GraphSettings | None,
    adapter_bytes: int,
) -> KVMemory:
    """Memory left for the KV cache by graphs and the largest steps, which run here; their cache counts as free."""
    shape, rows = loaded.cache_shape(), request.max_batch_size
    # Tables take memory for each position of a sequence. Ranks whose steps differ would wait for each other.
    free = _kv_memory(loaded.device, limits, -adapter_bytes)
    max_tokens = _longest(loaded, free, request)
    longest = min(request.max_input_tokens or max_tokens, max_tokens - 1)
    lengths = spread_prefill(
        request.max_batch_prefill_tokens,
        max_rows=rows,
        longest=longest,
        num_blocks=request.max_batch_prefill_tokens,
        block_size=shape.block_size,
    )
    num_blocks = 1 + sum(-(-length // shape.block_size) for length in lengths)
    longest_decode = LongestDecode(
        num_rows=rows,
        max_tokens=max_tokens,
        block_size=shape.block_size,
        max_drafts=loaded.max_draft_tokens,
    )
    num_blocks = max(num_blocks, longest_decode.num_blocks)
    too_long = contexts_too_long(rows, max_tokens)
    # The ids of all positions are in a table, and decodes have buffers in proportion.
    has_long = rows * max_tokens * ID_BYTES > sum(lengths) * shape.bytes_per_token
    with _memory_or(too_long if has_long else prefill_too_large(sum(lengths))):
        runner = _new_runner(
            loaded,
            max_batch_size=rows,
            max_tokens=max_tokens,
            num_blocks=num_blocks,
            graphs=graphs,
        )
        run_largest(runner, lengths)
        _run_with_adapters(loaded, runner, lengths)
    # Prompts of one token sample as many rows at once as decodes do.
    with _memory_or(batch_too_large(rows)):
        run_largest(runner, [1] * rows, decode=True)
    with _memory_or(too_long):
        longest_decode.run(runner)
    holds_cache = graphs is not None and graphs.holds_cache
    trial_bytes = 0 if holds_cache else num_blocks * shape.block_size * shape.bytes_per_token
    trial_bytes += (1 + rows + loaded.second_pages(1 + rows, rows)) * loaded.state_page_bytes
    return _kv_memory(loaded.device, limits, trial_bytes - adapter_bytes)


def _run_with_adapters(loaded: LoadedModel, runner: StepRunner, lengths: list[int]) -> None:
    """Run prompts of these lengths, then a short one, with an adapter that changes nothing.

    Kernels of adapters differ for many rows and few, and would else be compiled while streams wait.
    """
    table = None if loaded.adapters is None else loaded.adapters.table
    if table is None or not table.max_adapters:
        return
    table.put(1, PackedAdapter(digest="", parts={}, num_pages=0))
    try:
        run_largest(runner, lengths, adapter_slot=1)
        run_largest(runner, [1], adapter_slot=1)
    finally:
        table.remove(1)


@contextmanager
def _memory_or(too_large: CapacityError) -> Iterator[None]:
    """Raise `too_large` if the block runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise too_large from error


def _new_runner(  # noqa: PLR0913
    loaded: LoadedModel,
    *,
    max_batch_size: int,
    max_tokens: int,
    num_blocks: int,
    graphs: GraphSettings | None,
    store: KVStore | None = None,
    windows: Mapping[int, int] | None = None,
    state_pages: int | None = None,
    feature_rows: int = 0,
) -> StepRunner:
    """A runner with a cache, new or in `store`; graphs get an extra block for padding, behind the router's.

    `windows` has the number of blocks for the layers of the model with each window; others share `num_blocks`. Without
    `state_pages`, each slot has a page of states.
    """
    windows = windows or {}
    sizes = num_blocks, *windows.values()
    num_pages = 1 + max_batch_size if state_pages is None else state_pages
    second = loaded.second_pages(num_pages, max_batch_size)
    cache, states = loaded.new_cache(
        sizes, [*windows], store, is_padded=graphs is not None, num_pages=num_pages + second
    )
    limits = _limits(loaded, max_batch_size, max_tokens, sizes, 0 if graphs is None else num_blocks)
    limits = replace(limits, second_pages=second)
    adapters = None if loaded.adapters is None else loaded.adapters.table
    images = loaded.image_encoder(feature_rows)
    rows = None if images is None else images.features
    batch = Batch(limits, loaded.device, adapters, states, rows)
    model, captured = loaded.model, None
    num_layers = len(model.geometry.layers)
    cache, draft_cache = cache[:num_layers], cache[num_layers:]
    if graphs is not None:
        captured = DecodeGraphs(model, loaded.kernels, cache, batch)
        captured.capture(graphs, loaded.group)
        model = with_pieces(model, loaded.kernels, cache, batch, graphs, loaded.group)
    proposer = loaded.proposer(model, draft_cache, batch)
    if graphs is not None:
        parts = model, loaded.kernels, cache, batch
        capture_drafts(proposer, *parts, graphs, loaded.group)
    features = DecodingFeatures(
        grammars=loaded.grammars,
        proposer=proposer,
        watermark=loaded.watermark,
        kv_store=store,
        images=images,
    )
    return StepRunner(model, loaded.kernels, cache, batch, captured, features, dtype=loaded.dtype)


def _limits(
    loaded: LoadedModel,
    max_batch_size: int,
    max_tokens: int,
    sizes: tuple[int, ...],
    padding_block: int,
) -> BatchLimits:
    """The limits of a batch with a cache of `sizes` blocks in each group."""
    return BatchLimits(
        max_batch_size=max_batch_size,
        max_tokens=max_tokens,
        num_blocks=sizes[0],
        block_size=loaded.kernels.block_size,
        vocab_size=loaded.model.info.vocab_size,
        padding_block=padding_block,
        windows=sizes[1:],
        max_draft_tokens=loaded.max_draft_tokens,
        row_tile=CPU_TILE if loaded.device.type == "cpu" else 1,
    )
