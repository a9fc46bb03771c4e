"""Halves of a decoder layer, composed of single operators, and layers composed of halves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from millrace_shard.kernels.base import (
    AttentionBlock,
    Experts,
    Kernels,
    Layer,
    LayerCache,
    Layers,
    Linear,
    MlpBlock,
    Reduce,
)
from millrace_shard.kernels.experts.composed_experts import ComposedExperts
from millrace_shard.kernels.experts.expert_weights import ExpertsWeights, MixtureWeights
from millrace_shard.kernels.experts.mixture import Mixture
from millrace_shard.kernels.layer.activation import gate_function
from millrace_shard.kernels.layer.heads import HeadPreparation
from millrace_shard.kernels.layer.layer_weights import AttentionWeights, LinearWeights, MlpWeights
from millrace_shard.kernels.layer.norm_weights import HeadNorms, NormWeights
from millrace_shard.kernels.layer.normalised import added_and_normalised, normalised
from millrace_shard.kernels.lora.adapted_linear import adapted
from millrace_shard.kernels.lora.lora_site import LoraSite
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.sampling_kernels import SamplingKernels


class ComposedBlocks:
    """A base for kernels without operators for halves of a layer; the subclass defines the single operators."""

    sampling: SamplingKernels | None = None

    def linear_from(self: Kernels, weights: LinearWeights) -> Linear:
        """A linear over a copy of the weight, with its adapters."""
        linear = self.linear(weights.weight.copied(), weights.bias)
        return self.adapted(linear, weights.lora)

    def adapted(self: Kernels, linear: Linear, site: LoraSite | None) -> Linear:
        """`linear` with the adapters of `site`, in plain torch; `linear` itself without a site."""
        return adapted(linear, site, deterministic=self.deterministic)

    def head(self: Kernels, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        """An output head that takes over `weight` [vocab, hidden]; its logits are float32."""
        return self.adapted(_Head(self.linear(weight)), lora)

    def head_from(self: Kernels, weights: LinearWeights) -> Linear:
        """An output head over a copy of the weight, without a bias; its logits are float32."""
        return self.head(weights.weight.copied(), weights.lora)

    def attention(self: Kernels, weights: AttentionWeights) -> AttentionBlock:
        """The first half of a layer, of single operators."""
        return ComposedAttention(self, weights)

    def mlp(self: Kernels, weights: MlpWeights) -> MlpBlock:
        """The second half of a layer, of single operators."""
        return ComposedMlp(self, weights)

    def router(self: Kernels, weight: Tensor) -> Linear:
        """A linear in float32 that takes over `weight`."""
        return self.linear(weight)

    def experts(self: Kernels, weights: ExpertsWeights) -> Experts:
        """The experts of a layer, as linears."""
        return ComposedExperts(self, weights)

    def mixture(self: Kernels, weights: MixtureWeights) -> MlpBlock:
        """The second half of a layer with experts."""
        return Mixture(self, weights)

    def layers(self: Kernels, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        """Layers that call one half after the other."""
        return ComposedLayers(layers, reduce)


def normalise_heads(
    kernels: Kernels, qkv: Tensor, norms: HeadNorms, *, num_heads: int, num_kv_heads: int
) -> None:
    """Normalise the query heads and key heads of `qkv` [T, (num_heads + 2 * num_kv_heads) * head_dim] in place."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    queries, keys = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    for each, norm in ((queries, norms.query), (keys, norms.key)):
        each.copy_(kernels.rms_norm(each, norm.weight, norm.eps))


class ComposedAttention:
    """Norm, QKV, rope, attention and output projection as single operators."""

    def __init__(self, kernels: Kernels, weights: AttentionWeights) -> None:
        self._kernels = kernels
        self._norm = weights.norm
        self._qkv = kernels.linear_from(weights.qkv)
        self._prepare = HeadPreparation(weights)
        self._out = kernels.linear_from(weights.out)
        out = weights.out.weight
        self._new = partial(torch.zeros, dtype=out.dtype, device=out.device)
        self._hidden_size = out.shape[0]
        self._scale, self._window, self._softcap = weights.scale, weights.window, weights.softcap
        self._sinks = weights.sinks

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        queries = self.queries(x, residual, batch, cache)
        return self.output(self.attend(queries, batch, cache))

    def new_residual(self, num_tokens: int) -> Tensor:
        """Zeros [num_tokens, hidden]."""
        return self._new((num_tokens, self._hidden_size))

    def queries(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """All work before the attention, which stores keys and values: the queries [T, num_heads, head_dim].

        `batch` needs positions and cache rows only. `residual` is changed in place.
        """
        normed = added_and_normalised(self._kernels, x, residual, self._norm)
        return self._prepare(self._kernels, self._qkv(normed), batch, cache)

    def attend(self, queries: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        """The attention of `queries` over the cache: [T, num_heads * head_dim]."""
        return self._kernels.attend(
            queries,
            batch,
            cache,
            scale=self._scale,
            window=self._window,
            softcap=self._softcap,
            sinks=self._sinks,
        )

    def output(self, attended: Tensor) -> Tensor:
        """The output projection: [T, hidden]."""
        return self._out(attended)


class ComposedMlp:
    """Norm, gate and up projection, activation and down projection as single operators."""

    def __init__(self, kernels: Kernels, weights: MlpWeights) -> None:
        self._kernels = kernels
        self._norm = weights.norm
        self._gate_up = kernels.linear_from(weights.gate_up)
        self._down = kernels.linear_from(weights.down)
        self._activate = gate_function(kernels.silu_mul, weights.activation)

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        normed = added_and_normalised(self._kernels, x, residual, self._norm)
        return self._down(self._activate(self._gate_up(normed)))


class ResultNorm:
    """Normalises the result of a half, then multiplies it."""

    def __init__(self, kernels: Kernels, norm: NormWeights | None, multiplier: float) -> None:
        self._kernels = kernels
        self._norm = norm
        self._multiplier = multiplier

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        x = normalised(self._kernels, x, self._norm)
        return x if self._multiplier == 1 else x * self._multiplier


class ComposedLayers:
    """Layers that make one call per half."""

    def __init__(self, layers: Sequence[Layer], reduce: Reduce | None) -> None:
        self._layers = layers
        self._reduce = reduce or _as_it_is

    def __call__(
        self, residual: Tensor, batch: RaggedBatch, caches: Sequence[LayerCache]
    ) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        x: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            attended = layer.attention(x, residual, batch, cache)
            x = layer.after(attended, residual, self._reduce)
        assert x is not None, "a decoder has layers"
        return x


def _as_it_is(x: Tensor) -> Tensor:
    return x


class _Head:
    """A head that computes logits in the model's dtype and converts them to float32."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab] float32."""
        return self._linear(x).float()
