"""The interface between the engine and a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels, Layer, LayerCache, Layers, Reduce
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.states import StateLayer


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Shape of this rank's KV cache of one layer."""

    num_kv_heads: int
    head_dim: int
    scales: tuple[float, float] = (1.0, 1.0)
    """The checkpoint's scales of keys and values, for a cache in fp8."""
    window: int | None = None
    """Positions that a query sees, its own included; None: all."""
    latent_dim: int | None = field(default=None, kw_only=True)
    """The first channels of keys that are the values too; None: values are stored apart."""

    @property
    def num_tensors(self) -> int:
        """Tensors of `head_dim` channels: keys, and values where they are stored apart."""
        return 1 if self.latent_dim else 2

    def new_cache(
        self, kernels: Kernels, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """The layer's cache of these kernels; its memory is uninitialised."""
        return kernels.new_cache(
            num_blocks=num_blocks,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            device=device,
            scales=self.scales,
            latent_dim=self.latent_dim,
        )


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of this rank's KV cache and states."""

    layers: tuple[KVLayer, ...]
    """A recurrent layer has no heads here."""
    states: tuple[StateLayer, ...] = ()
    """The recurrent layers, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The properties of a model that the router needs."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    window_size: int | None
    """The attention window of all layers, if they have the same one."""
    batch_invariant: bool = True
    """Whether, with deterministic kernels, a row's bits do not depend on the composition of the batch."""
    quantization: str | None = None
    """The method of quantised weights, as `--quantize` names it; None for plain ones."""
    headless: bool = False
    """Whether the checkpoint has no output head, so that only hidden states have a meaning."""
    capturable: bool = True
    """Whether a step of single queries may be captured in a graph: the model's own code reads no values on the host."""


MakeLayers = Callable[[Sequence[Layer], Reduce | None], Layers]
"""Combines layers, as `Kernels.layers` does."""


class CausalModel(Protocol):
    """A decoder over token ids and a paged KV cache."""

    info: ModelInfo
    geometry: KVGeometry

    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Logits of `batch.logit_rows` over the whole vocabulary, [R, vocab] float32, contiguous, on every rank."""

    def states(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """The inputs of the head for `batch.logit_rows`, [R, hidden], on every rank."""

    def logits(self, states: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Logits of any rows of these states [R, hidden], with the same bits as from `forward`.

        `adapters` belong to the rows.
        """

    def first_layers(self, count: int) -> CausalModel:
        """A model over the same weights with the first `count` layers, or with all if layers cannot be separated.

        Layers reuse the same memory, so apart from the cache a step of two layers needs about as much of it as a step
        of all layers.
        """

    def with_layers(self, make: MakeLayers) -> CausalModel:
        """The same model with its layers combined by `make`, or this model if layers cannot be separated."""
