"""What a device has to offer a decoder: linears, norms, rope, paged attention, and whole halves of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.stored_weight import StoredWeight


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, `num_blocks` first; the rest of the layout is the kernels' own."""

    keys: Tensor
    values: Tensor


class Linear(Protocol):
    """A weight in whatever form its kernels like best."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out], same dtype but for a head's."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A weight [out, in] and its bias [out]."""

    weight: StoredWeight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """The first half of a layer, one rank's part of it."""

    norm: Tensor
    """[hidden]."""
    eps: float
    qkv: LinearWeights
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values."""
    query_norm: Tensor | None
    """[head_dim], and `key_norm` with it: each head is normalised before it is rotated."""
    key_norm: Tensor | None
    out: LinearWeights
    """[hidden, num_heads * head_dim]."""
    rope: Tensor
    """As `Kernels.rope_store` takes it."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """The second half of a layer, one rank's part of it."""

    norm: Tensor
    """[hidden]."""
    eps: float
    gate_up: LinearWeights
    """[2 * inter, hidden], gates first."""
    down: LinearWeights
    """[hidden, inter]."""


class AttentionBlock(Protocol):
    """`residual += x`, norm, QKV, rope, attention, output projection."""

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """What is to be added next, [T, hidden], perhaps in `x`'s memory; changes `residual` [T, hidden] in place."""


class MlpBlock(Protocol):
    """`residual += x`, norm, `down(silu(gate) * up)`."""

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """What is to be added next, [T, hidden], perhaps in `x`'s memory; changes `residual` [T, hidden] in place."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One rank's part of a layer; what its halves yield has to be summed over the ranks."""

    attention: AttentionBlock
    mlp: MlpBlock


Reduce = Callable[[Tensor], Tensor]
"""Sums what a half yields over the ranks, perhaps in place."""


class Layers(Protocol):
    """All layers of a decoder, one after the other."""

    def __call__(
        self, residual: Tensor, batch: RaggedBatch, caches: Sequence[LayerCache]
    ) -> Tensor:
        """What is to be added after the last, [T, hidden]; changes `residual` [T, hidden], the embeddings, in place."""


class Kernels(Protocol):
    """One implementation per device; `plain` is the oracle of the others."""

    name: str
    deterministic: bool
    """Whether a row's bits have to be the same whatever else is in the step."""
    block_size: int
    """KV positions per block."""
    capturable: bool
    """Whether single queries are attended to by what lies on the device alone, never by `num_context`.

    Only then may a step of them be captured in a graph and replayed over other contexts.
    """

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Take over `weight` [out, in] and `bias` [out]; the caller drops its own reference."""

    def linear_from(self, weights: LinearWeights) -> Linear:
        """Pack or copy `weights`, and keep nothing of where they lie but the bias."""

    def head(self, weight: Tensor) -> Linear:
        """Take over `weight` [vocab, hidden]; the logits it yields are float32."""

    def attention(self, weights: AttentionWeights) -> AttentionBlock:
        """Pack or copy the weights of half a layer."""

    def mlp(self, weights: MlpWeights) -> MlpBlock:
        """Pack or copy the weights of the other half."""

    def layers(self, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        """Put `layers` together, one at least; without `reduce` there is one rank."""

    def new_cache(
        self,
        *,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerCache:
        """A layer's cache; memory is touched only as blocks are used."""

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Clear `blocks` [n] int64 before their first use: a masked weight of 0 times a stale NaN is NaN."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last axis in float32, cast back, then scale by `weight`, as Llama does."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, rounded to its dtype; returns `rms_norm(residual)`. All [T, hidden]."""

    def rope_store(
        self,
        qkv: Tensor,
        rope: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        *,
        num_heads: int,
        num_kv_heads: int,
    ) -> Tensor:
        """Rotate queries and keys of `qkv` [T, (num_heads + 2 * num_kv_heads) * head_dim], store keys and values.

        `rope` [positions, rotary_dim] float32 holds cosines in its first half and sines in the second, already
        scaled; channels past rotary_dim pass unrotated, halves are paired as in Llama (i with i + rotary_dim / 2).
        Returns the queries [T, num_heads, head_dim], a view into `qkv` where that is cheaper.
        """

    def store(self, keys: Tensor, values: Tensor, batch: RaggedBatch, cache: LayerCache) -> None:
        """Store `keys` and `values` [T, num_kv_heads, head_dim] at `batch.cache_rows`."""

    def attend(
        self,
        queries: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention of `queries` [T, num_heads, head_dim] over the paged cache: [T, num_heads * head_dim].

        A query at position p sees keys in (p - window, p], or all up to p. Key chunks lie on a fixed absolute
        grid, so a row's bits depend neither on its batch mates nor on how its prompt was cut.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of [T, 2 * inter], gate first: [T, inter]."""
