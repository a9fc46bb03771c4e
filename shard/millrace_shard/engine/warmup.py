"""The warm-up: finds the KV capacity by a profile run of the largest steps, allocates the cache, and runs a prefill."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from millrace_proto.sampling import Sampling
from millrace_shard.adapters.arena import PAGE_BYTES
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.device_tables import BatchLimits
from millrace_shard.batch.sequence import Ids, Sequence
from millrace_shard.batch.sequence_table import CPU_TILE
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.resources import available_memory, free_cuda_memory
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
from millrace_shard.engine.loaded_model import AdapterMemory, LoadedModel, reserve_adapter_pages
from millrace_shard.kernels.base import LayerCache
from millrace_shard.model_runner.decode_graphs import DecodeGraphs
from millrace_shard.model_runner.graph_capture import GraphSettings, empty_cache
from millrace_shard.model_runner.piecewise_layers import with_pieces
from millrace_shard.model_runner.runner import DecodingFeatures, StepRunner


def run_largest(runner: StepRunner, lengths: list[int], *, decode: bool = False) -> None:
    """Run a step over prompts of these lengths that uses every part of sampling, then drop the sequences.

    With `decode` and speculative decoding, a step with all draft tokens follows. Raises any error of the device.
    """
    # Scores of prompts need little memory. They are slow on CPU; on CUDA they are fast, and their memory counts.
    scores = runner.batch.device.type == "cuda"
    size, max_drafts = runner.batch.limits.block_size, runner.batch.limits.max_draft_tokens
    decode = decode and max_drafts > 0
    room = 1 + max_drafts if decode else 0
    num_blocks = [-(-(length + room) // size) for length in lengths]
    slots = np.arange(len(lengths))
    prompts = Forward(
        change=BatchChange(
            admitted=tuple(
                _sequence(slot, np.zeros(length, dtype=np.int64), prefill_logprobs=scores)
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
            admitted=(_sequence(slot, ids, num_cached=self.num_cached),),
            grown_slots=np.full(len(blocks), slot),
            grown_blocks=blocks,
        )


def _sequence(
    slot: int, ids: Ids, *, num_cached: int = 0, prefill_logprobs: bool = False
) -> Sequence:
    return Sequence(
        slot=slot,
        request_id=0,
        input_ids=ids,
        cached_tokens=num_cached,
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
        prefill_logprobs=prefill_logprobs,
        prefill_top_n_tokens=5,
    )


def cache_too_large(num_tokens: int) -> CapacityError:

    return CapacityError(f"Not enough memory for a KV cache of {num_tokens} tokens")


def prefill_too_large(num_tokens: int) -> CapacityError:

    return CapacityError(
        f"Not enough memory to handle {num_tokens} prefill tokens. "
        "You need to decrease `--max-batch-prefill-tokens`"
    )


def batch_too_large(num_rows: int) -> CapacityError:

    return CapacityError(
        f"Not enough memory to choose the tokens of {num_rows} sequences at once. "
        "You need to decrease `--max-batch-size`"
    )


def contexts_too_long(num_rows: int, max_tokens: int) -> CapacityError:

    return CapacityError(
        f"Not enough memory to decode {num_rows} sequences of {max_tokens} tokens at once. "
        "You need to decrease `--max-batch-size` or `--max-total-tokens`"
    )


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
    """Memory left for the KV cache by graphs, the largest prefill and the largest decodes, which run here.

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
    num_layers = len(loaded.model.geometry.layers)
    cache, draft_cache = cache[:num_layers], cache[num_layers:]
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
