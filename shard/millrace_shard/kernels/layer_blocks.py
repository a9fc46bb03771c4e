"""Halves of a decoder layer, experts too, composed of single operators, and layers composed of halves.

Kernels have an operator for the usual case. The other cases are composed here, in plain torch.
"""

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
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.expert_weights import (
    ExpertsWeights,
    MixtureWeights,
    SharedExpertWeights,
)
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LinearWeights,
    MlpWeights,
    NormWeights,
    gate_function,
)
from millrace_shard.kernels.lora.adapted_linear import adapted
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.scores import SamplingKernels


def normalised(kernels: Kernels, x: Tensor, norm: NormWeights | None) -> Tensor:
    """The norm of `x` [T, hidden]; `x` itself without a norm."""
    if norm is None:
        return x
    return kernels.rms_norm(x, norm.weight, norm.eps) if norm.is_plain else norm.apply(x)


def added_and_normalised(
    kernels: Kernels, x: Tensor | None, residual: Tensor, norm: NormWeights | None
) -> Tensor:
    """`residual += x` in place, if there is an `x`, then its norm; all [T, hidden]."""
    if x is not None and norm is not None and norm.is_plain:
        return kernels.add_rms_norm(x, residual, norm.weight, norm.eps)
    if x is not None:
        residual += x
    return normalised(kernels, residual, norm)


class HeadPreparation:
    """Prepares the heads of one layer."""

    def __init__(self, weights: AttentionWeights) -> None:
        self._num_heads, self._num_kv_heads = weights.num_heads, weights.num_kv_heads
        self._head_dim = weights.head_dim
        self._rotation, self._norms = weights.rotation, weights.head_norms
        self._query_factors = weights.query_factors
        self._mean_over_ranks = weights.mean_over_ranks
        self._is_plain = weights.has_plain_heads

    def __call__(
        self, kernels: Kernels, qkv: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """Change `qkv` [T, (num_heads + 2 * num_kv_heads) * head_dim] in place; store keys and values.

        Returns the queries [T, num_heads, head_dim], possibly as a view into `qkv`.
        """
        norms, rotation = self._norms, self._rotation
        if self._is_plain:
            assert rotation is not None
            return kernels.rope_store(
                qkv,
                rotation.table,
                batch,
                cache,
                num_heads=self._num_heads,
                num_kv_heads=self._num_kv_heads,
                norms=norms,
            )
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        sizes = [self._num_heads, self._num_kv_heads, self._num_kv_heads]
        queries, keys, values = torch.split(heads, sizes, dim=1)
        if norms is not None and not norms.after_rope:
            self._normalise(queries, keys, norms)
        if rotation is not None:
            rotation.apply(heads[:, : -self._num_kv_heads], batch.positions)
        if norms is not None and norms.after_rope:
            self._normalise(queries, keys, norms)
        if self._query_factors is not None:
            factors = self._query_factors[batch.positions].view(-1, 1, 1)
            queries.copy_(queries * factors.to(queries.dtype))
        kernels.store(keys, values, batch, cache)
        return queries

    def _normalise(self, queries: Tensor, keys: Tensor, norms: HeadNorms) -> None:
        for heads, norm in ((queries, norms.query), (keys, norms.key)):
            heads.copy_(self._over_width(heads, norm) if norms.whole_width else norm.apply(heads))

    def _over_width(self, heads: Tensor, norm: NormWeights) -> Tensor:
        """The norm of `heads` [T, H, head_dim] over all heads of all ranks."""
        flat = heads.flatten(1)
        mean_square = flat.float().square().mean(-1, keepdim=True)
        if self._mean_over_ranks is not None:
            mean_square = self._mean_over_ranks(mean_square)
        return norm.apply(flat, mean_square).view(heads.shape)


class ComposedExperts:
    """Computes each expert over the rows that chose it, and adds up the results of a row in the order of its choice.

    A row's bits depend only on the row if the linears' bits do. The host waits for the choice.
    """

    def __init__(self, kernels: Kernels, weights: ExpertsWeights) -> None:
        router = weights.router
        self._logits = kernels.router(router.weight)
        self._bias, self._correction, self._rule = router.bias, router.correction, router.rule
        self._activate = gate_function(kernels.silu_mul, weights.activation)
        self._experts = [
            (kernels.linear_from(each.gate_up), kernels.linear_from(each.down))
            for each in weights.experts
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        logits = self._logits(x.float())
        if self._bias is not None:
            logits = logits + self._bias
        chosen, shares = self._rule.choose(logits, self._correction)
        results = x.new_zeros(*chosen.shape, x.shape[1])
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, ranks = torch.where(chosen == expert)
            gate_up, down = self._experts[expert]
            results[rows, ranks] = down(self._activate(gate_up(x[rows])))
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for result, share in zip(results.unbind(1), shares.unbind(1), strict=True):
            total = total + result.float() * share.unsqueeze(1)
        return total.to(x.dtype)


class Mixture:
    """Norm, the experts that a router chooses, and perhaps an expert that all tokens have."""

    def __init__(self, kernels: Kernels, weights: MixtureWeights) -> None:
        self._kernels = kernels
        self._norm = weights.norm
        # Its weights are valid until the first expert is read.
        self._shared = None if weights.shared is None else SharedExpert(kernels, weights.shared)
        self._experts = kernels.experts(weights.experts)

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        normed = added_and_normalised(self._kernels, x, residual, self._norm)
        y = self._experts(normed)
        return y if self._shared is None else y + self._shared(normed)


class SharedExpert:
    """An expert that all tokens have, of single operators."""

    def __init__(self, kernels: Kernels, weights: SharedExpertWeights) -> None:
        self._gate_up = kernels.linear_from(weights.gate_up)
        self._down = kernels.linear_from(weights.down)
        self._activate = gate_function(kernels.silu_mul, weights.activation)
        self._gate = None if weights.gate is None else kernels.linear_from(weights.gate)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        y = self._down(self._activate(self._gate_up(x)))
        if self._gate is None:
            return y
        gate = self._gate(x)
        share = elementwise(torch.sigmoid, gate) if gate.device.type == "cpu" else gate.sigmoid()
        return y * share


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
