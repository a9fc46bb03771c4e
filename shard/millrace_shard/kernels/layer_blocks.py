"""Halves of a decoder layer, experts too, composed of single operators, and layers composed of halves.

Kernels have an operator for the usual case. The other cases are composed here, in plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from millrace_shard.device.pulse import PULSE
from millrace_shard.kernels.base import (
    AttentionBlock,
    Experts,
    HeadsLinear,
    Kernels,
    Layer,
    LayerCache,
    Layers,
    Linear,
    MlpBlock,
    Reduce,
    added_and_normalised,
    normalised,
)
from millrace_shard.kernels.delta_rule import delta_rule
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.expert_weights import (
    ExpertsWeights,
    MixtureWeights,
    SharedExpertWeights,
)
from millrace_shard.kernels.head_preparation import POSITION_CHANNELS, HeadPreparation
from millrace_shard.kernels.latent_blocks import HeadByHead, LatentAttention
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LatentWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Rotation,
    gate_function,
    gelu_mul,
)
from millrace_shard.kernels.lora.adapted_linear import adapted
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.mamba2 import causal_conv, mamba1, mamba2
from millrace_shard.kernels.plain_attention import attend_whole
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.scores import SamplingKernels


class ComposedExperts:
    """Computes each expert over the rows that chose it, and adds up the results of a row in the order of its choice.

    A row's bits depend only on the row if the linears' bits do. The host waits for the choice.
    """

    def __init__(self, kernels: Kernels, weights: ExpertsWeights) -> None:
        router = weights.router
        self._logits = kernels.router(router.weight)
        self._bias, self._correction, self._rule = router.bias, router.correction, router.rule
        self._factors, self._scales_inputs = router.share_factors, weights.scales_inputs
        self._activate = gate_function(kernels, weights.activation)
        self._latent = [kernels.linear_from(each) for each in weights.latent or ()]
        self._experts = [
            (kernels.linear_from(each.gate_up), kernels.linear_from(each.down))
            for each in weights.experts
        ]

    def __call__(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """[T, hidden] to [T, hidden]; the router reads `router_input` [T, hidden], if it is not `x`."""
        logits = self._logits((x if router_input is None else router_input).float())
        if self._bias is not None:
            logits = logits + self._bias
        chosen, shares = self._rule.choose(logits, self._correction)
        if self._factors is not None:
            shares = shares * self._factors[chosen]
        if self._latent:
            x = self._latent[0](x)
        results = x.new_zeros(*chosen.shape, x.shape[1])
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, ranks = torch.where(chosen == expert)
            gate_up, down = self._experts[expert]
            inputs = x[rows]
            if self._scales_inputs:
                inputs = inputs * shares[rows, ranks].unsqueeze(1).to(x.dtype)
            results[rows, ranks] = down(self._activate(gate_up(inputs)))
        if self._scales_inputs:
            shares = torch.ones_like(shares)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for result, share in zip(results.unbind(1), shares.unbind(1), strict=True):
            total = total + result.float() * share.unsqueeze(1)
        y = total.to(x.dtype)
        return self._latent[1](y) if self._latent else y


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
        self._activate = gate_function(kernels, weights.activation)
        self._gate = None if weights.gate is None else kernels.linear_from(weights.gate)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        y = self._down(self._activate(self._gate_up(x)))
        if self._gate is None:
            return y
        gate = self._gate(x)
        share = elementwise(torch.sigmoid, gate) if gate.device.type == "cpu" else gate.sigmoid()
        return y * share


class SideBySide:
    """A linear whose outputs are the outputs of several linears, one after the other."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return torch.cat([linear(x) for linear in self._linears], dim=1)


class ComposedBlocks:
    """A base for kernels without operators for halves of a layer; the subclass defines the single operators."""

    sampling: SamplingKernels | None = None
    operators: tuple[str, ...] = ()

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

    def latent_attention(self: Kernels, weights: LatentWeights) -> AttentionBlock:
        """The first half of a layer over latents, of single operators."""
        return LatentAttention(self, weights)

    def heads_linear(self: Kernels, weight: Tensor) -> HeadsLinear:
        """A linear for each head, one after the other."""
        return HeadByHead([self.linear(each.contiguous()) for each in weight])

    def prepare_latents(
        self: Kernels,
        heads: Tensor,
        queries: Tensor,
        shared: Tensor,
        norm: NormWeights,
        rotation: Rotation | None,
        batch: RaggedBatch,
        cache: LayerCache,
    ) -> None:
        """In plain torch, with the key as if it were one more head."""
        assert cache.latent_dim is not None
        to_latent, to_key = torch.tensor_split(heads, [cache.latent_dim], dim=2)
        latent, key = torch.tensor_split(shared, [cache.latent_dim], dim=1)
        to_latent[:, -1] = self.norm(latent, norm)
        to_key[:, :-1] = queries
        to_key[:, -1] = key
        if rotation is not None:
            rotation.apply(to_key, batch.positions)
        self.store(heads[:, -1:], heads[:, -1:], batch, cache)

    def mlp(self: Kernels, weights: MlpWeights) -> MlpBlock:
        """The second half of a layer, of single operators."""
        return ComposedMlp(self, weights)

    def zero_layers(self: Kernels, layers: Sequence[LayerCache], blocks: Sequence[Tensor]) -> None:
        for layer in layers:
            self.zero_blocks(layer, blocks[layer.group])

    def norm(self: Kernels, x: Tensor, norm: NormWeights) -> Tensor:
        """By an operator if it is RMSNorm, else in plain torch."""
        return self.rms_norm(x, norm.factors, norm.eps) if norm.is_rms else norm.apply(x)

    def add_norm(self: Kernels, x: Tensor, residual: Tensor, norm: NormWeights) -> Tensor:
        if norm.is_rms:
            return self.add_rms_norm(x, residual, norm.factors, norm.eps)
        residual += x
        return self.norm(residual, norm)

    def prepare_heads(
        self: Kernels,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        batch: RaggedBatch,
        cache: LayerCache,
        sizes: tuple[int, int],
    ) -> Tensor | None:
        """By `rope_store` if halves of heads are rotated and each head has an RMSNorm, or none."""
        if rotation.interleaved or not (norms is None or norms.is_plain):
            return None
        heads, kv_heads = sizes
        return self.rope_store(
            qkv, rotation.table, batch, cache, num_heads=heads, num_kv_heads=kv_heads, norms=norms
        )

    def router(self: Kernels, weight: Tensor) -> Linear:
        """A linear in float32 that takes over `weight`."""
        return self.linear(weight)

    def experts(self: Kernels, weights: ExpertsWeights) -> Experts:
        """The experts of a layer, as linears."""
        return ComposedExperts(self, weights)

    def mixture(self: Kernels, weights: MixtureWeights) -> MlpBlock:
        """The second half of a layer with experts."""
        return Mixture(self, weights)

    gelu_mul = staticmethod(gelu_mul)
    delta_rule = staticmethod(delta_rule)
    causal_conv = staticmethod(causal_conv)
    mamba2 = staticmethod(mamba2)
    mamba1 = staticmethod(mamba1)
    attend_whole = staticmethod(attend_whole)

    def layers(self: Kernels, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        """Layers that call one half after the other."""
        return ComposedLayers(layers, reduce)


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
        self._hidden_size, self.attended_width = out.shape
        self._scale, self._window, self._softcap = weights.scale, weights.window, weights.softcap
        self._sinks, self._chunks = weights.sinks, weights.chunks
        self._position_channels = 0 if weights.slopes is None else POSITION_CHANNELS
        self._gates = (weights.num_heads, 2, weights.head_dim) if weights.has_gate else None
        """Heads, query and gate, channels."""

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        if self._gates is not None:
            return self._gated(self._gates, x, residual, batch, cache)
        queries = self.queries(x, residual, batch, cache)
        return self.output(self.attend(queries, batch, cache))

    def _gated(
        self,
        shape: tuple[int, int, int],
        x: Tensor | None,
        residual: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
    ) -> Tensor:
        normed = added_and_normalised(self._kernels, x, residual, self._norm)
        qkv, width = self._qkv(normed), math.prod(shape)
        heads, keys_values = torch.split(qkv, [width, qkv.shape[1] - width], dim=1)
        queries, gates = (each.flatten(1) for each in heads.view(-1, *shape).unbind(2))
        plain = torch.cat([queries, keys_values], dim=1)
        attended = self.attend(self._prepare(self._kernels, plain, batch, cache), batch, cache)
        is_cpu = gates.device.type == "cpu"
        shares = elementwise(torch.sigmoid, gates) if is_cpu else gates.sigmoid()
        return self.output(attended * shares)

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
        attended = self._kernels.attend(
            queries,
            batch if self._chunks is None else self._chunks(batch),
            cache,
            scale=self._scale,
            window=self._window,
            softcap=self._softcap,
            sinks=self._sinks,
        )
        if self._position_channels:
            by_head = attended.view(*queries.shape)[..., : -self._position_channels]
            attended = by_head.flatten(1)
        return attended

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
        self._activate = gate_function(kernels, weights.activation)
        self._of_gate, self._of_result = weights.multipliers

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        normed = added_and_normalised(self._kernels, x, residual, self._norm)
        gate_up = self._gate_up(normed)
        if self._of_gate != 1:
            gate_up.chunk(2, dim=1)[0].mul_(self._of_gate)
        y = self._down(self._activate(gate_up))
        return y if self._of_result == 1 else y * self._of_result


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
            if layer.attention is not None:
                x = layer.attention(x, residual, batch.of_group(cache.group), cache)
                PULSE.advance()
            x = layer.after(x, residual, self._reduce, batch.layer_inputs)
            PULSE.advance()
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
