"""The decoder that a DecoderSpec describes, over any kernels and any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.pulse import PULSE
from millrace_shard.kernels.base import (
    Kernels,
    Layer,
    LayerCache,
    LayerEnd,
    Layers,
    Reduce,
    added_and_normalised,
)
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.lora.adapter_table import AdapterRows, AdapterTable, running
from millrace_shard.kernels.ragged import RaggedBatch, ReplacedRows
from millrace_shard.models.interface import KVGeometry, KVLayer, MakeLayers, ModelInfo
from millrace_shard.models.layer_loader import LayerLoader
from millrace_shard.models.spec import DecoderSpec
from millrace_shard.models.split import kv_heads_per_rank


class Decoder:
    """A CausalModel; each rank holds its heads, its intermediate channels and its part of the vocabulary."""

    def __init__(
        self,
        spec: DecoderSpec,
        info: ModelInfo,
        loader: LayerLoader,
        kernels: Kernels,
        group: ProcessGroup,
        adapters: AdapterTable | None = None,
    ) -> None:
        """Load this rank's weights by `loader`, for these kernels, ranks and adapters."""
        self.info = info if loader.has_head else replace(info, headless=True)
        self.hidden_size = spec.hidden_size
        self.spec = spec
        self._kernels = kernels
        self._group = group
        self._adapters = adapters
        world_size = group.world_size
        self._kv_layers = spec.kv_layers
        self.geometry = KVGeometry(
            tuple(
                KVLayer(
                    kv_heads_per_rank(layer.attention, world_size),
                    layer.attention.cached_dim,
                    loader.kv_scales(index),
                    layer.attention.window or layer.attention.chunk,
                    latent_dim=layer.attention.latent_dim,
                )
                if layer.attends and layer.attention.kv_source is None
                else KVLayer(0, layer.attention.head_dim)
                for index, layer in enumerate(spec.layers)
            ),
            tuple(
                layer.recurrent.state_layer(world_size)
                for layer in spec.layers
                if layer.recurrent is not None
            ),
        )
        loader.ropes.limit(self.geometry.layers)
        self.embedding = loader.embedding()
        """This rank's rows, [share of the vocabulary, hidden]."""
        self._embedding_norm = loader.embedding_norm()
        self._layer_inputs = loader.layer_inputs()
        self._layers = [loader.layer(index) for index in range(len(spec.layers))]
        self.make_layers: MakeLayers = kernels.layers
        self.stacked_layers: dict[int, Layers] = {}
        self.run_layers = self._runner_of(self._layers)
        self._axes = loader.axes()
        self.last_norm = loader.last_norm()
        self._head = loader.head(self.embedding)
        self._head_bias = loader.head_bias()

    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Logits of `batch.logit_rows` over the whole vocabulary, [R, vocab] float32, on every rank."""
        return self.logits(self.states(batch, cache), batch.logit_adapters)

    def states(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Hidden states of `batch.logit_rows` after the last norm, [R, hidden], on every rank."""
        residual = self._embed(batch.ids)
        run_layers = self.run_layers
        if batch.replaced is not None:
            batch, count = self._replace_rows(residual, batch, batch.replaced)
            run_layers = self._layers_with_inputs(count) if count else run_layers
        if batch.axes is not None and self._axes is not None:
            batch = batch.with_rotations(self._axes.of_tokens(batch.axes))
        caches = [cache[index] for index in self._kv_layers[: len(cache)]]
        with running(self._adapters, tokens=batch.adapters):
            if self._layer_inputs is not None:
                table, make = self._layer_inputs
                inputs = make(residual, embedded(batch.ids, table, self._group))
                batch = replace(batch, layer_inputs=inputs)
            x = run_layers(residual, batch, caches)
        x, residual = batch.logit_states(x), batch.logit_states(residual)
        if x.shape[0] == 0:
            return x
        return added_and_normalised(self._kernels, x, residual, self.last_norm)

    def logits(self, states: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        if states.shape[0] == 0:
            return states.new_empty(0, self.info.vocab_size, dtype=torch.float32)
        with running(self._adapters, logits=adapters):
            logits = self._head(states)
        PULSE.advance()
        logits = self._group.all_gather_logits(logits, self.info.vocab_size)
        if self._head_bias is not None:
            logits = logits + self._head_bias
        return finished_logits(logits, self.spec.logit_multiplier, self.spec.logit_softcap)

    def first_layers(self, count: int) -> Decoder:
        first = copy.copy(self)
        first.geometry = replace(self.geometry, layers=self.geometry.layers[:count])
        first.run_layers = self._runner_of(self._layers[:count])
        first.stacked_layers = {}
        return first

    def with_layers(self, make: MakeLayers) -> Decoder:
        other = copy.copy(self)
        other.run_layers = make(self._layers[: len(self.geometry.layers)], self._reduce)
        other.make_layers, other.stacked_layers = make, {}
        return other

    def _replace_rows(
        self, residual: Tensor, batch: RaggedBatch, rows: ReplacedRows
    ) -> tuple[RaggedBatch, int]:
        """Put features into `residual`; the step with what so many first layers add to it (deepstack)."""
        parts = rows.values.view(len(rows.values), -1, self.hidden_size)
        residual[rows.tokens] = parts[:, 0]
        count = parts.shape[1] - 1
        if count:
            inputs = residual.new_zeros(len(residual), count, self.hidden_size)
            inputs[rows.tokens] = parts[:, 1:]
            batch = replace(batch, layer_inputs=inputs)
        return batch, count

    def _layers_with_inputs(self, count: int) -> Layers:
        """The layers, of which the first `count` add an input of theirs."""
        if count not in self.stacked_layers:
            layers = self._layers[: len(self.geometry.layers)]
            made = [replace(each, end=_added(index)) for index, each in enumerate(layers[:count])]
            self.stacked_layers[count] = self.make_layers([*made, *layers[count:]], self._reduce)
        return self.stacked_layers[count]

    def _runner_of(self, layers: Sequence[Layer]) -> Layers:
        return self._kernels.layers(layers, self._reduce)

    @property
    def _reduce(self) -> Reduce | None:
        return self._group.all_reduce if self._group.world_size > 1 else None

    def _embed(self, ids: Tensor) -> Tensor:
        x = embedded(ids, self.embedding, self._group)
        if self._embedding_norm is not None:
            return self._embedding_norm.apply(x)
        if self.spec.embedding_multiplier == 1:
            return x
        return x * torch.tensor(self.spec.embedding_multiplier, dtype=x.dtype)


def _added(index: int) -> LayerEnd:
    """What adds input `index` of a token to the state; it is 0 for a token that is no part of an image."""

    def end(x: Tensor, residual: Tensor, inputs: Tensor | None) -> Tensor:
        assert inputs is not None
        residual += x
        return inputs[:, index].contiguous()

    return end


def embedded(ids: Tensor, embedding: Tensor, group: ProcessGroup) -> Tensor:
    """The rows [T, hidden] of `ids` [T], on every rank; each has its rows of `embedding`."""
    if group.world_size == 1:
        return F.embedding(ids, embedding)
    share = embedding.shape[0]
    local = ids - group.rank * share
    elsewhere = (local < 0) | (local >= share)
    x = F.embedding(local.masked_fill(elsewhere, 0), embedding)
    return group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(1), 0))


def finished_logits(logits: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    """`logits` [R, vocab] float32, multiplied and capped; changed in place."""
    if multiplier != 1:
        logits *= multiplier
    if softcap is None:
        return logits
    logits /= softcap
    capped = elementwise(torch.tanh, logits) if logits.device.type == "cpu" else logits.tanh_()
    return capped.mul_(softcap)
