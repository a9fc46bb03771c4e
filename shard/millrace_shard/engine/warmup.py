"""Finds the KV capacity, allocates the cache, and tries the largest prefill once unless another rank has had it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from millrace_shard.batch.batch import Batch
from millrace_shard.batch.batch_limits import BatchLimits
from millrace_shard.batch.forced_token_budget import CPU_TILE
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.resources import available_memory, free_cuda_memory
from millrace_shard.engine.kv_capacity import (
    CacheShape,
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
from millrace_shard.engine.profile_run import (
    batch_too_large,
    cache_too_large,
    prefill_too_large,
    run_largest,
)
from millrace_shard.kernels.base import Kernels
from millrace_shard.model_runner.decode_graphs import DecodeGraphs, GraphSettings
from millrace_shard.model_runner.runner import DecodingFeatures, StepRunner
from millrace_shard.models.interface import CausalModel
from millrace_shard.sampling.watermark import Watermark
from millrace_shard.speculation.factory import Speculation
from millrace_shard.structured_output.manager import GrammarManager

logger = logging.getLogger(__name__)

TRIED_LAYERS = 2
"""Of which the largest prefill is tried on CPUs, where all of them would take large models minutes.

Two, as the first has no output of another to add to its residual, and takes less memory than those after it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A rank's model and all that runs it."""

    model: CausalModel
    kernels: Kernels
    group: ProcessGroup
    device: torch.device
    dtype: torch.dtype
    speculation: Speculation | None = None
    """How tokens are guessed ahead; None: not at all."""
    guides: GrammarManager | None = None
    """What makes the masks of sequences that have a grammar; None: such a sequence runs without."""
    watermark: Watermark | None = None

    @property
    def max_draft_tokens(self) -> int:
        """Tokens that may be guessed ahead for one sequence in one step."""
        return 0 if self.speculation is None else self.speculation.most

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(num_kv_heads, head_dim) of each layer with a KV cache, the model's own first."""
        drafts = () if self.speculation is None else self.speculation.layers
        return (*self.model.geometry.layers, *drafts)

    def first_layers(self, count: int) -> LoadedModel:
        """With at most so many layers, of the model and of its draft."""
        speculation = self.speculation
        if speculation is not None and speculation.draft is not None:
            speculation = replace(speculation, draft=speculation.draft.first_layers(count))
        return replace(self, model=self.model.first_layers(count), speculation=speculation)

    def cache_shape(self) -> CacheShape:
        """What a block of this rank's caches costs."""
        elements = sum(2 * num_heads * head_dim for num_heads, head_dim in self.layers)
        return CacheShape(
            block_size=self.kernels.block_size,
            bytes_per_token=elements * self.dtype.itemsize,
            max_position_embeddings=self.model.info.max_position_embeddings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """What the operator grants this shard."""

    kv_memory: int | None = None
    cuda_memory_fraction: float = 1.0


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """A runner with its final cache, and the capacity that has."""

    runner: StepRunner
    capacity: Capacity


def warm_up(
    loaded: LoadedModel,
    request: WarmupRequest,
    limits: MemoryLimits,
    *,
    rehearse: bool | None = None,
    graphs: GraphSettings | None = None,
) -> WarmedUp:
    """A collective: every rank calls it at the same time, and all agree on the capacity.

    To `rehearse` is to run the largest steps before memory is measured, by default on CUDA; without it, the largest
    prefill is tried on few layers once there is a cache, unless the request names the blocks of a rank whose place this
    one takes: clients wait, and it fitted there. `graphs` are captured where the kernels allow it: in the rehearsal
    too, so that they are measured, since they are bound to their cache. Whatever held an earlier cache has to be gone.
    Raises CapacityError.
    """
    shape = loaded.cache_shape()
    if rehearse is None:
        rehearse = loaded.device.type == "cuda"
    graphs = _usable(graphs, loaded)
    memory = (
        _memory_after_rehearsal(loaded, request, limits, graphs)
        if rehearse
        else _kv_memory(loaded.device, limits, trial_bytes=0)
    )
    fitting = loaded.group.minimum(blocks_in(memory.for_request(request), shape))
    _release_memory(loaded.device)
    capacity = plan_capacity(request, shape, fitting_blocks=fitting, is_budget=memory.is_budget)
    with _memory_or(cache_too_large(capacity.max_batch_total_tokens)):
        runner = _new_runner(
            loaded,
            max_batch_size=request.max_batch_size,
            max_tokens=capacity.max_total_tokens,
            num_blocks=capacity.num_blocks,
            graphs=graphs,
        )
    if not rehearse and request.num_blocks is None:
        _try_largest_prefill(loaded, request, capacity)
    return WarmedUp(runner, capacity)


def _try_largest_prefill(loaded: LoadedModel, request: WarmupRequest, capacity: Capacity) -> None:
    lengths = spread_prefill(
        request.max_batch_prefill_tokens,
        max_rows=request.max_batch_size,
        longest=capacity.max_input_tokens,
        num_blocks=capacity.num_blocks - 1,
        block_size=capacity.block_size,
    )
    with _memory_or(prefill_too_large(sum(lengths))):
        trial = _new_runner(
            loaded.first_layers(TRIED_LAYERS),
            max_batch_size=request.max_batch_size,
            max_tokens=capacity.max_total_tokens,
            num_blocks=1 + sum(-(-length // capacity.block_size) for length in lengths),
            graphs=None,
        )
        run_largest(trial, lengths)


def _kv_memory(device: torch.device, limits: MemoryLimits, trial_bytes: int) -> KVMemory:
    if device.type == "cuda":
        free, total = free_cuda_memory(device)
        return cuda_memory(
            free=free + trial_bytes,
            total=total,
            fraction=limits.cuda_memory_fraction,
            kv_memory=limits.kv_memory,
        )
    return cpu_memory(available=available_memory(), kv_memory=limits.kv_memory)


def _usable(graphs: GraphSettings | None, loaded: LoadedModel) -> GraphSettings | None:
    if graphs is not None and not loaded.kernels.capturable:
        logger.warning("decoding without CUDA graphs, which plain torch kernels do not allow")
        return None
    return graphs


def _memory_after_rehearsal(
    loaded: LoadedModel,
    request: WarmupRequest,
    limits: MemoryLimits,
    graphs: GraphSettings | None,
) -> KVMemory:
    """Leave in torch's allocator what graphs, the largest prefill and the largest decode need, and measure the rest.

    The cache of the rehearsal is left there too but will be given back.
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
    per_decode = -(-(2 + loaded.max_draft_tokens) // shape.block_size)
    num_blocks = max(num_blocks, 1 + request.max_batch_size * per_decode)
    with _memory_or(prefill_too_large(sum(lengths))):
        runner = _new_runner(
            loaded,
            max_batch_size=request.max_batch_size,
            max_tokens=max_tokens,
            num_blocks=num_blocks,
            graphs=graphs,
        )
        run_largest(runner, lengths)
    # Prompts of one token are sampled from as decodes are, all of them at once.
    with _memory_or(batch_too_large(request.max_batch_size)):
        run_largest(runner, [1] * request.max_batch_size, decode=True)
    trial_bytes = num_blocks * shape.block_size * shape.bytes_per_token
    return _kv_memory(loaded.device, limits, trial_bytes)


@contextmanager
def _memory_or(too_large: CapacityError) -> Iterator[None]:
    """Raises `too_large` where memory ends."""
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
    """Graphs get a block of their own to pad with, past those that the router knows."""
    cache = [
        loaded.kernels.new_cache(
            num_blocks=num_blocks if graphs is None else num_blocks + 1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        for num_kv_heads, head_dim in loaded.layers
    ]
    # Block 0 fills up short block tables: it is never written, and may be read where it weighs nothing.
    unowned = [0] if graphs is None else [0, num_blocks]
    reserved = torch.tensor(unowned, dtype=torch.int64, device=loaded.device)
    for layer in cache:
        loaded.kernels.zero_blocks(layer, reserved)
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
    batch = Batch(limits, loaded.device)
    own = len(loaded.model.geometry.layers)
    cache, draft_cache = cache[:own], cache[own:]
    proposer = None
    if loaded.speculation is not None:
        proposer = loaded.speculation.proposer(
            loaded.model, loaded.kernels, draft_cache, batch, loaded.dtype
        )
    captured = None
    if graphs is not None:
        captured = DecodeGraphs(loaded.model, cache, batch)
        captured.capture(graphs, loaded.group)
    return StepRunner(
        loaded.model,
        loaded.kernels,
        cache,
        batch,
        captured,
        DecodingFeatures(guides=loaded.guides, proposer=proposer, watermark=loaded.watermark),
    )


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
