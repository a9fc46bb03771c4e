"""A loaded model of one rank, with everything that runs it, and the memory of its adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch

from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.adapters.arena import PAGE_BYTES
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.sequence_images import FeatureRows
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.resources import available_memory, free_cuda_memory
from millrace_shard.engine.kv_capacity import (
    CacheShape,
    Capacity,
    CapacityError,
    KVMemory,
    WarmupRequest,
    WindowShape,
    blocks_in,
    feature_rows_in,
    plan_capacity,
    second_pages,
    state_pages_in,
)
from millrace_shard.kernels.base import Kernels, LayerCache, window_reach
from millrace_shard.kernels.kv_cache import head_bytes
from millrace_shard.kernels.kv_store import KVStore
from millrace_shard.kernels.states import LayerState
from millrace_shard.model_runner.graph_capture import GraphSettings, empty_cache
from millrace_shard.models.interface import CausalModel, KVLayer
from millrace_shard.sampling.watermark import Watermark
from millrace_shard.speculation.loading import Speculation
from millrace_shard.speculation.proposer import Proposer
from millrace_shard.structured_output.manager import GrammarManager
from millrace_shard.vision.encoder import ImageEncoder, Vision


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
    activations: str | None = None
    """The activations of products with quantised weights, as in --quantize-activations; None for plain weights."""
    int8_gain: float | None = None
    """How many times as fast activations in int8 are, if they were chosen by it."""
    speculation: Speculation | None = None
    """None: there are no draft tokens."""
    grammars: GrammarManager | None = None
    """None: a sequence with a grammar fails."""
    watermark: Watermark | None = None
    adapters: AdapterStore | None = None
    """None: a sequence with an adapter fails."""
    identity: str = ""
    """A digest of files and flags, on which the memory of a step depends; empty where it is not known."""
    kv_store: KVStore | None = None
    """The memory of the KV cache, if that outlives the process."""
    kv_groups: bool = True
    """Whether layers with an attention window may give their blocks back."""
    vision: Vision | None = None
    """None: a sequence with images fails."""

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

    def proposer(
        self, model: CausalModel, cache: list[LayerCache], batch: Batch
    ) -> Proposer | None:
        """Drafts for `batch`, which `model` runs, over the `cache` of the draft's layers; None without drafts."""
        if self.speculation is None:
            return None
        proposer = self.speculation.proposer(model, self.kernels, cache, batch, self.dtype)
        proposer.logs = self.group.rank == 0
        return proposer

    def cache_shape(self) -> CacheShape:
        """The cost of a block of this rank's KV caches."""
        return CacheShape(
            block_size=self.kernels.block_size,
            bytes_per_token=self._bytes_per_token(self.layers),
            max_position_embeddings=self.model.info.max_position_embeddings,
            windows=self._windows() if self.kv_groups else (),
        )

    @property
    def state_page_bytes(self) -> int:
        """Bytes of a page of this rank's states."""
        return sum(layer.num_bytes(self.dtype) for layer in self.model.geometry.states)

    def second_pages(self, num_pages: int, max_batch_size: int) -> int:
        """Pages of states behind `num_pages`, for steps with draft tokens."""
        if not (self.model.geometry.states and self.max_draft_tokens):
            return 0
        return second_pages(num_pages, max_batch_size)

    def new_states(self, num_pages: int) -> tuple[LayerState, ...]:
        """Pages for the states of each recurrent layer, page 0 included."""
        layers = self.model.geometry.states
        return tuple(layer.new(num_pages, self.dtype, self.device) for layer in layers)

    @property
    def feature_row_bytes(self) -> int:
        """Bytes of a feature of an image; 0 if the model reads none."""
        return 0 if self.vision is None else self.vision.spec.row_size * self.dtype.itemsize

    def feature_rows_in(self, memory: KVMemory, request: WarmupRequest) -> int:
        """Rows for features of images that fit on every rank; 0 if the model reads none. Raises CapacityError."""
        if self.vision is None:
            return 0
        fitting = feature_rows_in(
            memory,
            request,
            row_bytes=self.feature_row_bytes,
            tile_rows=self.vision.spec.rows_per_tile,
            extra_rows=self.vision.spec.extra_rows,
            max_tiles=self.vision.spec.max_tiles,
            max_positions=self.model.info.max_position_embeddings,
        )
        return self.group.minimum(fitting)

    def capacity_in(self, memory: KVMemory, request: WarmupRequest) -> Capacity:
        """The blocks, pages of states and rows of features that fit into the memory of every rank.

        Raises CapacityError.
        """
        shape, page_bytes = self.cache_shape(), self.state_page_bytes
        drafts = self.max_draft_tokens > 0
        state_pages = state_pages_in(memory, request, page_bytes, drafts=drafts)
        if page_bytes:
            state_pages = self.group.minimum(state_pages)
        all_pages = state_pages + self.second_pages(state_pages, request.max_batch_size)
        memory = replace(memory, bytes=memory.bytes - all_pages * page_bytes)
        feature_rows = self.feature_rows_in(memory, request)
        memory = replace(memory, bytes=memory.bytes - feature_rows * self.feature_row_bytes)
        fitting = self.group.minimum(blocks_in(memory, shape))
        capacity = plan_capacity(request, shape, fitting_blocks=fitting, is_budget=memory.is_budget)
        return replace(
            capacity,
            state_pages=state_pages,
            state_page_bytes=page_bytes,
            feature_rows=feature_rows,
        )

    def image_encoder(self, num_rows: int) -> ImageEncoder | None:
        """An encoder without images, over uninitialised rows; None if the model reads none."""
        if self.vision is None:
            return None
        spec = self.vision.spec
        shape = num_rows, spec.row_size
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        features = FeatureRows(values, spec.image_token_id, spec.mask, has_axes=spec.has_axes)
        return ImageEncoder(self.vision, features)

    def _windows(self) -> tuple[WindowShape, ...]:
        """The layers of the model with each attention window; a draft model's layers keep all positions."""
        own = self.model.geometry.layers
        shapes = []
        for window in sorted({layer.window for layer in own if layer.window is not None}):
            layers = tuple(layer for layer in own if layer.window == window)
            shapes.append(
                WindowShape(
                    window=window,
                    reach=window_reach(self.kernels, window),
                    num_layers=len(layers),
                    bytes_per_token=self._bytes_per_token(layers),
                )
            )
        return tuple(shapes)

    def _bytes_per_token(self, layers: Iterable[KVLayer]) -> int:
        return sum(
            layer.num_tensors * layer.num_kv_heads * head_bytes(layer.head_dim, self.kv_dtype)
            for layer in layers
        )

    def new_cache(
        self,
        sizes: Sequence[int],
        windows: Sequence[int],
        store: KVStore | None,
        *,
        is_padded: bool,
        num_pages: int,
    ) -> tuple[list[LayerCache], tuple[LayerState, ...]]:
        """The cache of each of `layers`, new or in `store`, with zeros in the blocks that no sequence owns, and states.

        `sizes` are the blocks of each group: first of layers without a window of `windows`, then of each window's. With
        `is_padded`, each cache has one more block, for padding rows. Each recurrent layer has `num_pages`.
        """
        states = self.new_states(num_pages)
        num_own = len(self.model.geometry.layers)
        groups = [
            1 + windows.index(layer.window) if index < num_own and layer.window in windows else 0
            for index, layer in enumerate(self.layers)
        ]
        cache = [
            self._layer_cache(layer, group, sizes[group] + is_padded)
            for layer, group in zip(self.layers, groups, strict=True)
        ]
        if store is not None:
            name = f"{self.kernels.name} {self.kernels.block_size} {self.identity}"
            parts = [each.by_block for each in cache]
            starts = [0, *accumulate(sizes)]
            firsts = [starts[each.group] for each in cache for _ in each.by_block]
            pages = [*chain(*(layer.tensors for layer in states))]
            # A draft model computes a token after the model, so that a block may be sealed before.
            count = len(pages) + sum(map(len, parts[:num_own]))
            stored = store.tensors(
                [*pages, *chain(*parts)],
                name,
                firsts=[starts[-1]] * len(pages) + firsts,
                num_verified=count,
            )
            tensors = iter(stored)
            states = tuple(
                LayerState(next(tensors), next(tensors), each.other_inputs) for each in states
            )
            cache = [each.in_memory_of(tensors) for each in cache]
        for each in cache:
            # Block 0 pads short block tables: it is never written, and read only with a weight of zero.
            unowned = [0, sizes[each.group]] if is_padded else [0]
            reserved = torch.tensor(unowned, dtype=torch.int64, device=self.device)
            self.kernels.zero_blocks(each, reserved)
        return cache, states

    def _layer_cache(self, layer: KVLayer, group: int, num_blocks: int) -> LayerCache:
        cache = layer.new_cache(self.kernels, num_blocks, self.kv_dtype, self.device)
        return replace(cache, group=group)

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
