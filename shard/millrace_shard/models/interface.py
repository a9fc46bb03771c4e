"""What the engine asks of a model, whichever of the two paths built it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.ragged import RaggedBatch


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of this rank's KV cache: one (num_kv_heads, head_dim) pair per layer."""

    layers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the router has to know of a model."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    window_size: int | None
    """Set when every layer has this attention window."""
    batch_invariant: bool = True
    """Whether the model's own code keeps what deterministic kernels promise: bits independent of batch mates."""


class CausalModel(Protocol):
    """A decoder over token ids and a paged KV cache."""

    info: ModelInfo
    geometry: KVGeometry

    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Logits of `batch.logit_rows` over the whole vocabulary, [R, vocab] float32, contiguous, on every rank."""

    def states(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """`forward` as far as the head: what that reads of `batch.logit_rows`, [R, hidden], on every rank."""

    def logits(self, states: Tensor) -> Tensor:
        """The rest of it, for any of these states [R, hidden]; the same bits."""

    def first_layers(self, count: int) -> CausalModel:
        """The same weights with at most so many layers, or with all where they cannot be told from one another.

        Layers follow one another in the same memory: a step of two needs about as much beside the cache as one of all.
        """
