"""Linears with int8 weights, half the memory of bfloat16 weights, and int8 (dynamic W8A8) or exact activations.

Weights are symmetric with one scale per output; rounded activations are symmetric with one scale for every 32 inputs of
a row, computed at run time. A row's bits depend only on the row. The output head keeps its dtype, since its errors
would affect the probabilities directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from millrace_shard.kernels.base import (
    AttentionBlock,
    Experts,
    HeadsLinear,
    Kernels,
    Layer,
    Layers,
    Linear,
    MlpBlock,
    Reduce,
)
from millrace_shard.kernels.build import operators_loaded
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.expert_weights import ExpertsWeights, ExpertWeights
from millrace_shard.kernels.layer_blocks import ComposedBlocks
from millrace_shard.kernels.layer_weights import AttentionWeights, LinearWeights, MlpWeights
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.quantized import QuantizedTensor, quantize_rows, rounded_rows
from millrace_shard.kernels.stored_weight import StoredWeight, UnreadParts

ZERO = 128
"""The code of 0."""


def with_int8(kernels: Kernels, *, integer: bool = True) -> Kernels:
    """`kernels` with every linear in int8 but the head; without `integer`, activations keep their dtype."""
    kind = Int8Kernels
    if isinstance(kernels, CpuKernels) and kernels.tiles:
        kind = TiledInt8Kernels
    return cast("Kernels", kind(kernels, integer=integer))


def is_fast() -> bool:
    """Whether the operators are available; if not, int8 is slower than bfloat16."""
    return operators_loaded()


class Int8Kernels(ComposedBlocks):
    """Kernels whose linears are int8; everything else is delegated to the wrapped kernels."""

    def __init__(self, kernels: Kernels, *, integer: bool) -> None:
        self._kernels = kernels
        self._integer = integer

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._kernels, name)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Quantize `weight` [out, in] and keep `bias` [out]."""
        if self._integer:
            return PlainInt8Linear(weight, bias)
        return self._kernels.linear(int8_weight(weight).dequantized().to(weight.dtype), bias)

    def heads_linear(self, weight: Tensor) -> HeadsLinear:
        """The linears of the wrapped kernels, over `weight` [heads, out, in]."""
        return self._kernels.heads_linear(weight)

    def router(self, weight: Tensor) -> Linear:
        """The router of the wrapped kernels, over `weight` [E, hidden] float32."""
        return self._kernels.router(weight)

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        """The head of the wrapped kernels, over `weight` [vocab, hidden]."""
        return self._kernels.head(weight, lora)

    def head_from(self, weights: LinearWeights) -> Linear:
        return self._kernels.head_from(weights)

    def attend_whole(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float
    ) -> Tensor:
        """The attention of the wrapped kernels."""
        return self._kernels.attend_whole(queries, keys, values, scale=scale)


class TiledInt8Kernels(Int8Kernels):
    """int8 linears by the operators over tiles, in halves of a layer and in whole layers."""

    def __init__(self, kernels: Kernels, *, integer: bool) -> None:
        super().__init__(kernels, integer=integer)
        self._tiled = CpuKernels(deterministic=kernels.deterministic, integer=integer)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Quantize `weight` [out, in] and keep `bias` [out]."""
        return self.linear_from(LinearWeights(StoredWeight.of(weight), bias))

    def linear_from(self, weights: LinearWeights) -> Linear:
        """Quantize the weight, unless it is quantised."""
        return self._tiled.linear_from(_in_int8(weights))

    def attention(self, weights: AttentionWeights) -> AttentionBlock:
        """The first half of a layer, with its linears in int8."""
        qkv, out = _in_int8(weights.qkv), _in_int8(weights.out)
        return self._tiled.attention(replace(weights, qkv=qkv, out=out))

    def mlp(self, weights: MlpWeights) -> MlpBlock:
        """The second half of a layer, with its linears in int8."""
        gate_up, down = _in_int8(weights.gate_up), _in_int8(weights.down)
        return self._tiled.mlp(replace(weights, gate_up=gate_up, down=down))

    def experts(self, weights: ExpertsWeights) -> Experts:
        """The experts of a layer, with their linears in int8."""
        quantized = (
            ExpertWeights(gate_up=_in_int8(each.gate_up), down=_in_int8(each.down))
            for each in weights.experts
        )
        latent = weights.latent and (_in_int8(weights.latent[0]), _in_int8(weights.latent[1]))
        return self._tiled.experts(replace(weights, experts=quantized, latent=latent))

    def layers(self, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        """One operator for all layers, where there is one."""
        return self._tiled.layers(layers, reduce)


def _in_int8(weights: LinearWeights) -> LinearWeights:
    """The weights with codes of 8 bits; those that have codes keep them."""
    stored = weights.weight
    if isinstance(stored.parts, UnreadParts):
        return weights
    if any(isinstance(part, QuantizedTensor) for part in stored.parts):
        return weights
    parts = UnreadParts(stored.shape, lambda: (int8_weight(stored.copied()),))
    return replace(weights, weight=replace(stored, parts=parts))


def int8_weight(weight: Tensor) -> QuantizedTensor:
    """`weight` [out, in], symmetric with one scale per output."""
    quantized, scales = quantize_rows(weight)
    return QuantizedTensor(
        codes=(quantized.short() + ZERO).to(torch.uint8),
        values=torch.arange(256.0) - ZERO,
        scales=scales,
        group_size=weight.shape[1],
    )


class PlainInt8Linear:
    """The int8 linear in plain torch, by slow sums in float64."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._scales = quantize_rows(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        rows = rounded_rows(x.reshape(-1, x.shape[-1]))
        y = rows @ self._weight.double().T * self._scales.flatten().double()
        if self._bias is not None:
            y += self._bias.double()
        return y.to(x.dtype).view(*x.shape[:-1], len(self._scales))
