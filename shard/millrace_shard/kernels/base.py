"""The operators that a device offers to a decoder: linears, norms, rope, paged attention, and halves of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from millrace_shard.kernels.delta_rule import DeltaHeads, DeltaInputs
from millrace_shard.kernels.expert_weights import ExpertsWeights, MixtureWeights
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LatentWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Rotation,
)
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.mamba2 import ConvWeights, Mamba1Channels, Mamba2Heads
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.scores import SamplingKernels
from millrace_shard.kernels.states import LayerState


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, with `num_blocks` as the first axis; the kernels define the rest of the layout.

    They are in the dtype of the model, or codes of int8 or fp8; see `kv.codes`.
    """

    keys: Tensor
    values: Tensor
    """The tensor of the keys itself, if there is a `latent_dim`."""
    scales: tuple[Tensor, Tensor] | None = None
    """float32 scales of the codes of keys and of values: one of each for fp8, one per position and head for int8."""
    group: int = 0
    """Which block tables of a batch lead to its blocks, see `RaggedBatch.of_group`."""
    latent_dim: int | None = None
    """The first channels of keys that are the values, too (MLA); None: values are stored apart."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and the scales of both, if there are any, as compiled operators take them."""
        if self.latent_dim is not None:
            return (self.keys,)
        return (self.keys, self.values, *(self.scales or ()))

    @property
    def by_block(self) -> tuple[Tensor, ...]:
        """The tensors with `num_blocks` as the first axis."""
        is_whole = self.keys.dtype == torch.int8 or self.latent_dim is not None
        return self.tensors if is_whole else (self.keys, self.values)

    def in_memory_of(self, tensors: Iterator[Tensor]) -> LayerCache:
        """The same over the next of `tensors`, which replace `by_block` in their order."""
        keys = next(tensors)
        values = keys if self.latent_dim is not None else next(tensors)
        if len(self.by_block) <= len((keys, values)):
            return replace(self, keys=keys, values=values)
        return replace(self, keys=keys, values=values, scales=(next(tensors), next(tensors)))

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


class HeadsLinear(Protocol):
    """A linear layer for each head."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the results of `x` [T, heads, in] to `out` [T, heads, out], whose last axes are contiguous."""


class Experts(Protocol):
    """The experts of a layer, of which a router chooses some for each row."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden], normalised, to the sum of the results of the chosen experts, [T, hidden]."""


Reduce = Callable[[Tensor], Tensor]
"""Sums the result of a half over the ranks, perhaps in place."""
Finish = Callable[[Tensor], Tensor]
"""Turns the result of a half [T, hidden], summed over the ranks, into the summand of the residual."""


class LayerEnd(Protocol):
    """What a layer does to the state after both halves."""

    def __call__(self, x: Tensor, residual: Tensor, inputs: Tensor | None) -> Tensor:
        """Return the next summand [T, hidden]; update `residual` [T, hidden] in place.

        `x` [T, hidden] is the summand of the second half, and `inputs` are `RaggedBatch.layer_inputs`.
        """


@dataclass(frozen=True, slots=True)
class Layer:
    """One rank's part of a layer; the results of its halves must be summed over the ranks."""

    attention: AttentionBlock | None
    """None: the layer has only a second half, which reads what the last layer yields."""
    mlp: MlpBlock | None
    """None: the layer has only a first half."""
    after_attention: Finish | None = None
    """None: the result is the summand, as in Llama."""
    after_mlp: Finish | None = None
    is_parallel: bool = False
    """Whether both halves read the same residual, and their results are added together."""
    end: LayerEnd | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the results of the halves are added one after the other, as they are."""
        return not (self.after_attention or self.after_mlp or self.is_parallel or self.end)

    def after(
        self,
        x: Tensor | None,
        residual: Tensor,
        reduce: Reduce,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """From the result of the first half to the next summand; `residual` is changed in place.

        If there is no first half, `x` is the last summand, or None in the first layer. `inputs` are those of
        `RaggedBatch.layer_inputs`.
        """
        if self.is_parallel:
            assert x is not None
            assert self.mlp is not None
            return _finished(reduce(x + self.mlp(None, residual)), self.after_mlp)
        if self.attention is not None:
            assert x is not None
            x = _finished(reduce(x), self.after_attention)
        if self.mlp is not None:
            x = _finished(reduce(self.mlp(x, residual)), self.after_mlp)
        assert x is not None, "a layer has a half"
        return x if self.end is None else self.end(x, residual, inputs)


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
    operators: tuple[str, ...]
    """Operators of libraries that replace some of these kernels' own."""
    deterministic: bool
    """Whether a row's bits must not depend on the rest of the step."""
    block_size: int
    """KV positions per block."""
    key_tile: int
    """Keys that attention reads at a time, from a multiple of it on. With a window, it reads and masks older keys."""
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

    def latent_attention(self, weights: LatentWeights) -> AttentionBlock:
        """The first half of a layer over latents, over packed or copied weights."""

    def heads_linear(self, weight: Tensor) -> HeadsLinear:
        """A linear for each head that takes over `weight` [heads, out, in]."""

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
        latent_dim: int | None = None,
    ) -> LayerCache:
        """The cache of a layer; its memory is uninitialised.

        `dtype` is the model's, or a dtype of codes. `scales` belong to keys and values in fp8. With `latent_dim`,
        values are the first channels of keys, and `dtype` is the model's.
        """

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Zero `blocks` [n] int64 before their first use: a masked weight of 0 times a stale NaN is NaN."""

    def zero_layers(self, layers: Sequence[LayerCache], blocks: Sequence[Tensor]) -> None:
        """`zero_blocks` of all `layers`, for the blocks of each one's group."""

    def zero_rows(self, cache: LayerCache, rows: Tensor, dtype: torch.dtype) -> None:
        """Zero positions at `rows` [n] int64 (`block * block_size + offset`) for the same reason.

        `dtype` is the model's, on which the order of codes depends.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last axis in float32, cast back, then scale by `weight`, as in Llama.

        A float32 `weight` of another dtype than `x` scales before the cast, as in Gemma.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, rounded to its dtype; returns `rms_norm(residual)`. All [T, hidden]."""

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """The norm of `x` [..., n] over its last axis, as `NormWeights.apply`."""

    def add_norm(self, x: Tensor, residual: Tensor, norm: NormWeights) -> Tensor:
        """`residual += x` in place, rounded to its dtype; returns `norm(residual)`. All [T, hidden]."""

    def prepare_heads(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        batch: RaggedBatch,
        cache: LayerCache,
        sizes: tuple[int, int],
    ) -> Tensor | None:
        """As `rope_store`, with the numbers of query heads and of key heads, for any rotation and norms.

        Returns None, and changes nothing, if these kernels have no operator for them.
        """

    def prepare_latents(
        self,
        heads: Tensor,
        queries: Tensor,
        shared: Tensor,
        norm: NormWeights,
        rotation: Rotation | None,
        batch: RaggedBatch,
        cache: LayerCache,
    ) -> None:
        """Write rotated `queries` [T, num_heads, rope_dim] to `heads`; store the normalised latent and rotated key.

        `heads` is [T, num_heads + 1, latent_dim + rope_dim]: queries whose first `latent_dim` channels are there, and
        working memory. `shared` [T, latent_dim + rope_dim] has the latent and the key.
        """

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
        """Store `keys` and `values` [T, num_kv_heads, head_dim] at `batch.cache_rows`.

        A cache of latents has no values apart, and keeps `keys` only.
        """

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

        Over latents the result is [T, num_heads * latent_dim].

        A query at position p sees the keys in (p - window, p], or all keys up to p; with `batch.key_ends`, the keys
        after p too, up to its end. `sinks` [num_heads] float32 are
        scores without a value that take part in the softmax of their head. If deterministic, a row's bits
        depend neither on the composition of the batch nor on the prefill chunks.
        """

    def attend_whole(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float
    ) -> Tensor:
        """Attention of `queries` to all of `keys` and `values`: [N, num_heads * head_dim] of [N, num_heads, head_dim].

        If deterministic, its bits depend on these alone.
        """

    def delta_rule(
        self, inputs: DeltaInputs, heads: DeltaHeads, batch: RaggedBatch, state: LayerState
    ) -> Tensor:
        """Convolution, gated delta rule, and norm of each head times `silu(z)`: [T, num_values * value_dim].

        Changes the pages of `state` that `batch` names. A row's bits depend neither on the rest of the batch nor on the
        chunks of its prompt.
        """

    def causal_conv(
        self, x: Tensor, conv: ConvWeights, batch: RaggedBatch, state: LayerState
    ) -> Tensor:
        """The convolution of each channel of `x` [T, channels] over its sequence: [T, channels], in the same dtype.

        Changes the pages of `state.conv`. A row's bits depend on no other row, as with `delta_rule`.
        """

    def mamba2(
        self, mixed: Tensor, dt: Tensor, heads: Mamba2Heads, batch: RaggedBatch, state: LayerState
    ) -> Tensor:
        """The state space of Mamba-2: [T, heads * head_dim] float32.

        `mixed` is [T, heads * head_dim + 2 * groups * state_dim]: values, then input and output matrices; `dt` is
        [T, heads]. Changes the pages of `state.state`, [heads, state_dim, head_dim]. A row's bits depend on no other
        row, as with `delta_rule`.
        """

    def mamba1(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        channels: Mamba1Channels,
        batch: RaggedBatch,
        state: LayerState,
    ) -> Tensor:
        """The state space of Mamba 1: [T, channels] float32.

        `inputs` are values and step sizes, each [T, channels], and matrices [T, 2 * state_dim], of inputs, then of
        outputs. Changes the pages of `state.state`, [state_dim, channels]. A row's bits depend on no other row.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` [T, 2 * inter], gates first: [T, inter]."""

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """`gelu(gate) * up` likewise, by the tanh approximation."""


def window_reach(kernels: Kernels, window: int) -> int:
    """Positions before a query's own in blocks that attention with this window may read, masked ones included."""
    return window - 1 + max(0, kernels.key_tile - kernels.block_size)


def normalised(kernels: Kernels, x: Tensor, norm: NormWeights | None) -> Tensor:
    """The norm of `x` [T, hidden]; `x` itself without a norm."""
    if norm is None:
        return x
    return kernels.norm(x, norm)


def added_and_normalised(
    kernels: Kernels, x: Tensor | None, residual: Tensor, norm: NormWeights | None
) -> Tensor:
    """`residual += x` in place, if there is an `x`, then its norm; all [T, hidden]."""
    if x is not None and norm is not None:
        return kernels.add_norm(x, residual, norm)
    if x is not None:
        residual += x
    return normalised(kernels, residual, norm)
