"""The operators that a device offers to a decoder: linears, norms, rope, paged attention, and halves of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from millrace_shard.kernels.expert_weights import ExpertsWeights, MixtureWeights
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LinearWeights,
    MlpWeights,
)
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.scores import SamplingKernels


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, with `num_blocks` as the first axis; the kernels define the rest of the layout.

    They are in the dtype of the model, or codes of int8 or fp8; see `kv.codes`.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    """float32 scales of the codes of keys and of values: one of each for fp8, one per position and head for int8."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and the scales of both, if there are any, as compiled operators take them."""
        return (self.keys, self.values, *(self.scales or ()))

    @property
    def by_block(self) -> tuple[Tensor, ...]:
        """The tensors with `num_blocks` as the first axis."""
        return self.tensors if self.keys.dtype == torch.int8 else (self.keys, self.values)

    def zero(self, blocks: Tensor) -> None:
        """Zero `blocks` [n] int64."""
        for each in self.by_block:
            # index_fill_ does not support fp8.
            (each.view(torch.int8) if each.itemsize == 1 else each).index_fill_(0, blocks, 0)


class Linear(Protocol):
    """A linear layer, whose weight is in the kernels' own layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out] in the same dtype, or in float32 for a head."""


class AttentionBlock(Protocol):
    """The first half of a layer: `residual += x`, norm, QKV, rope, attention, output projection."""

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """Return the next summand [T, hidden], perhaps in the memory of `x`; update `residual` [T, hidden] in place."""


class MlpBlock(Protocol):
    """The second half of a layer: `residual += x`, norm, `down(activation(gate) * up)`."""

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Return the next summand [T, hidden], perhaps in the memory of `x`; update `residual` [T, hidden] in place."""


class Experts(Protocol):
    """The experts of a layer, of which a router chooses some for each row."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden], normalised, to the sum of the results of the chosen experts, [T, hidden]."""


Reduce = Callable[[Tensor], Tensor]
"""Sums the result of a half over the ranks, perhaps in place."""
Finish = Callable[[Tensor], Tensor]
"""Turns the result of a half [T, hidden], summed over the ranks, into the summand of the residual."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One rank's part of a layer; the results of its halves must be summed over the ranks."""

    attention: AttentionBlock
    mlp: MlpBlock
    after_attention: Finish | None = None
    """None: the result is the summand, as in Llama."""
    after_mlp: Finish | None = None
    is_parallel: bool = False
    """Whether both halves read the same residual, and their results are added together."""

    @property
    def is_plain(self) -> bool:
        """Whether the results of the halves are added one after the other, as they are."""
        return not (self.after_attention or self.after_mlp or self.is_parallel)

    def after(self, attended: Tensor, residual: Tensor, reduce: Reduce) -> Tensor:
        """From the result of the attention to the next summand; `residual` is changed in place."""
        if self.is_parallel:
            return _finished(reduce(attended + self.mlp(None, residual)), self.after_mlp)
        x = _finished(reduce(attended), self.after_attention)
        return _finished(reduce(self.mlp(x, residual)), self.after_mlp)


def _finished(x: Tensor, finish: Finish | None) -> Tensor:
    return x if finish is None else finish(x)


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

    def head_from(self, weights: LinearWeights) -> Linear:
        """An output head over a packed or copied weight without a bias, with its adapters."""

    def attention(self, weights: AttentionWeights) -> AttentionBlock:
        """The first half of a layer, over packed or copied weights."""

    def mlp(self, weights: MlpWeights) -> MlpBlock:
        """The second half of a layer, over packed or copied weights."""

    def router(self, weight: Tensor) -> Linear:
        """A linear in float32, never quantised, that takes over `weight` [E, hidden] float32."""

    def experts(self, weights: ExpertsWeights) -> Experts:
        """The experts of a layer and their router, over packed or copied weights."""

    def mixture(self, weights: MixtureWeights) -> MlpBlock:
        """The second half of a layer with experts, over packed or copied weights."""

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
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> LayerCache:
        """The cache of a layer; its memory is uninitialised.

        `dtype` is the model's, or a dtype of codes. `scales` belong to keys and values in fp8.
        """

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

        With `norms`, which must be plain, each query head and key head is normalised before it is rotated.
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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of `queries` [T, num_heads, head_dim] over the paged cache: [T, num_heads * head_dim].

        A query at position p sees the keys in (p - window, p], or all keys up to p. `sinks` [num_heads] float32 are
        scores without a value that take part in the softmax of their head. If deterministic, a row's bits
        depend neither on the composition of the batch nor on the prefill chunks.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` [T, 2 * inter], gates first: [T, inter]."""
