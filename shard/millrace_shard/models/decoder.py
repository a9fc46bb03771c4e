"""The decoder that a DecoderSpec describes, over any kernels and any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, Layer, LayerCache, Layers, Reduce
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.layer_blocks import added_and_normalised
from millrace_shard.kernels.lora.adapter_table import AdapterRows, AdapterTable, running
from millrace_shard.kernels.ragged import RaggedBatch
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
        self.geometry = KVGeometry(
            tuple(
                KVLayer(
                    kv_heads_per_rank(layer.attention, world_size),
                    layer.attention.head_dim,
                    loader.kv_scales(index),
                )
                for index, layer in enumerate(spec.layers)
            )
        )
        self._embedding = loader.embedding()
        self._layers = [loader.layer(index) for index in range(len(spec.layers))]
        self.run_layers = self._runner_of(self._layers)
        self._norm = loader.last_norm()
        self._head = loader.head(self._embedding)

    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Logits of `batch.logit_rows` over the whole vocabulary, [R, vocab] float32, on every rank."""
        return self.logits(self.states(batch, cache), batch.logit_adapters)

    def states(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Hidden states of `batch.logit_rows` after the last norm, [R, hidden], on every rank."""
        residual = self._embed(batch.ids)
        with running(self._adapters, tokens=batch.adapters):
            x = self.run_layers(residual, batch, cache)
        x, residual = batch.logit_states(x), batch.logit_states(residual)
        if x.shape[0] == 0:
            return x
        return added_and_normalised(self._kernels, x, residual, self._norm)

    def logits(self, states: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        if states.shape[0] == 0:
            return states.new_empty(0, self.info.vocab_size, dtype=torch.float32)
        with running(self._adapters, logits=adapters):
            logits = self._head(states)
        logits = self._group.all_gather_logits(logits, self.info.vocab_size)
        return finished_logits(logits, self.spec.logit_multiplier, self.spec.logit_softcap)

    def first_layers(self, count: int) -> Decoder:
        first = copy.copy(self)
        first.geometry = KVGeometry(self.geometry.layers[:count])
        first.run_layers = self._runner_of(self._layers[:count])
        return first

    def with_layers(self, make: MakeLayers) -> Decoder:
        other = copy.copy(self)
        other.run_layers = make(self._layers[: len(self.geometry.layers)], self._reduce)
        return other

    def _runner_of(self, layers: Sequence[Layer]) -> Layers:
        return self._kernels.layers(layers, self._reduce)

    @property
    def _reduce(self) -> Reduce | None:
        return self._group.all_reduce if self._group.world_size > 1 else None

    def _embed(self, ids: Tensor) -> Tensor:
        x = self._rows_of_embedding(ids)
        if self.spec.embedding_multiplier == 1:
            return x
        return x * torch.tensor(self.spec.embedding_multiplier, dtype=x.dtype)

    def _rows_of_embedding(self, ids: Tensor) -> Tensor:
        if self._group.world_size == 1:
            return F.embedding(ids, self._embedding)
        share = self._embedding.shape[0]
        local = ids - self._group.rank * share
        elsewhere = (local < 0) | (local >= share)
        x = F.embedding(local.masked_fill(elsewhere, 0), self._embedding)
        return self._group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(1), 0))


def finished_logits(logits: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    """`logits` [R, vocab] float32, multiplied and capped; changed in place."""
    if multiplier != 1:
        logits *= multiplier
    if softcap is None:
        return logits
    logits /= softcap
    capped = elementwise(torch.tanh, logits) if logits.device.type == "cpu" else logits.tanh_()
    return capped.mul_(softcap)
