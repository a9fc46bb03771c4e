"""The operators that a device offers to a decoder: linears, norms, rope, paged attention, and halves of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from millrace_shard.kernels.lora.lora_site import LoraSite
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.sampling_kernels import SamplingKernels
from millrace_shard.kernels.stored_weight import StoredWeight


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, with `num_blocks` as the first axis; the kernels define the rest of the layout."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of query heads and key heads, as in Qwen3: `Kernels.rms_norm` over each head."""

    query: Tensor
    """[head_dim], as is `key`."""
    key: Tensor
    eps: float


class Linear(Protocol):
    """A linear layer, whose weight is in the kernels' own layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out] in the same dtype, or in float32 for a head."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A weight [out, in], its bias [out], and the modules that adapters may change."""

    weight: StoredWeight
    bias: Tensor | None = None
    lora: LoraSite | None = None
    """None: there are no adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """The weights of one rank's part of the first half of a layer."""

    norm: Tensor
    """[hidden]."""
    eps: float
    qkv: LinearWeights
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values."""
    query_norm: Tensor | None
    """[head_dim], as is `key_norm`: if given, each head is normalised before it is rotated."""
    key_norm: Tensor | None
    out: LinearWeights
    """[hidden, num_heads * head_dim]."""
    rope: Tensor
    """The table that `Kernels.rope_store` takes."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """The weights of one rank's part of the second half of a layer."""

    norm: Tensor
    """[hidden]."""
    eps: float
    gate_up: LinearWeights
    """[2 * inter, hidden], gates first."""
    down: LinearWeights
    """[hidden, inter]."""


class AttentionBlock(Protocol):
    """The first half of a layer: `residual += x`, norm, QKV, rope, attention, output projection."""

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """Return the next summand [T, hidden], perhaps in the memory of `x`; update `residual` [T, hidden] in place."""


class MlpBlock(Protocol):
    """The second half of a layer: `residual += x`, norm, `down(silu(gate) * up)`."""

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the next summand [T, hidden], perhaps in the memory of `x`; update `residual` [T, hidden] in place."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One rank's part of a layer; the results of its halves must be summed over the ranks."""

    attention: AttentionBlock
    mlp: MlpBlock


Reduce = Callable[[Tensor], Tensor]
"""Sums the result of a half over the ranks, perhaps in place."""


class Layers(Protocol):
    """All layers of a decoder, one after the other."""

    def __call__(
        self, residual: Tensor, batch: RaggedBatch, caches: Sequence[LayerCache]
    ) -> Tensor:
        """Return the last summand, [T, hidden]; update `residual` [T, hidden], at first the embeddings, in place."""


class Kernels(Protocol):
    """The operators of one kind of device; `plain` is the oracle of the other implementations."""

    name: str
    deterministic: bool
    """Whether a row's bits must not depend on the rest of the step."""
    block_size: int
    """KV positions per block."""
    capturable: bool
    """Whether the attention of single queries reads lengths on the device only, never `num_context`.

    Only then may a step of single queries be captured in a graph and replayed over other contexts.
    """
    sampling: SamplingKernels | None
    """None: sampling runs on plain torch."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A linear that takes over `weight` [out, in] and `bias` [out]; the caller drops its references."""

    def linear_from(self, weights: LinearWeights) -> Linear:
        """A linear over a packed or copied weight, with its adapters; of `weights` only bias and site are kept."""

    def adapted(self, linear: Linear, site: LoraSite | None) -> Linear:
        """`linear` with the adapters of `site`, which are added to its results; `linear` itself without a site."""

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        """An output head that takes over `weight` [vocab, hidden]; its logits are float32."""

    def attention(self, weights: AttentionWeights) -> AttentionBlock:
        """The first half of a layer, over packed or copied weights."""

    def mlp(self, weights: MlpWeights) -> MlpBlock:
        """The second half of a layer, over packed or copied weights."""

    def layers(self, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        """Combine `layers`, at least one; `reduce` is None if there is a single rank."""

    def new_cache(
        self,
        *,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerCache:
        """The cache of a layer; its memory is uninitialised."""

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Zero `blocks` [n] int64 before their first use: a masked weight of 0 times a stale NaN is NaN."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last axis in float32, cast back, then scale by `weight`, as in Llama."""

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
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotate queries and keys of `qkv` [T, (num_heads + 2 * num_kv_heads) * head_dim]; store keys and values.

        With `norms`, each query head and key head is normalised before it is rotated.
        `rope` [positions, rotary_dim] float32 holds cosines in its first half and sines in the second, both scaled.
        Channel i is paired with i + rotary_dim / 2, as in Llama; channels past rotary_dim are not rotated. Returns the
        queries [T, num_heads, head_dim], possibly as a view into `qkv`.
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

        A query at position p sees the keys in (p - window, p], or all keys up to p. If deterministic, a row's bits
        depend neither on the composition of the batch nor on the prefill chunks.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` [T, 2 * inter], gates first: [T, inter]."""
