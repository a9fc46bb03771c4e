"""Linears and halves of a layer as single operators on AMX, for bfloat16 weights.

A row's bits depend on nothing but the row: sums run over the whole of K in one order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.kernels.base import AttentionWeights, LayerCache, LinearWeights, MlpWeights
from millrace_shard.ragged import RaggedBatch

TILE_DEPTH = 32
"""Inputs in a tile: widths that are read as tiles are multiples of it."""
TILE_COLUMNS = 16


def available() -> bool:
    """Whether the loaded operators were built for AMX and the system grants it."""
    return bool(torch.ops.millrace.amx_granted())


def fits_attention(weights: AttentionWeights) -> bool:
    """Whether AmxAttention takes these weights."""
    weight = weights.qkv.weight
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[1] % TILE_DEPTH == 0
        and weights.head_dim % TILE_DEPTH == 0
    )


def fits_mlp(weights: MlpWeights) -> bool:
    """Whether AmxMlp takes these weights."""
    weight = weights.gate_up.weight
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[1] % TILE_DEPTH == 0
        and weight.shape[0] % (2 * TILE_COLUMNS) == 0
    )


class PanelLinear:
    """A weight in panels of 32 outputs; what it yields is bfloat16, or float32 where asked for."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._out = weight.shape[0]
        self._dtype = dtype
        self._packed = torch.ops.millrace.pack_panels(weight.contiguous(), False)  # noqa: FBT003
        self._bias = _or_empty(bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y = x.new_empty(*x.shape[:-1], self._out, dtype=self._dtype)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        torch.ops.millrace.panel_linear(y.view(-1, self._out), rows, self._packed, self._bias)
        return y


class AmxAttention:
    """Norm, QKV, rope, attention and output projection in one parallel region."""

    def __init__(self, weights: AttentionWeights) -> None:
        self._norm, self._eps = weights.norm, weights.eps
        self._qkv, self._qkv_bias = _packed(weights.qkv)
        self._query_norm, self._key_norm = map(_or_empty, (weights.query_norm, weights.key_norm))
        self._out, self._out_bias = _packed(weights.out)
        self._rope = weights.rope
        self._num_heads = weights.num_heads
        self._scale = weights.head_dim**-0.5
        self._window = weights.window or 0
        self._nothing = _or_empty(None)

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """[T, hidden], in `x` where there is one; `residual` is changed in place."""
        y = torch.empty_like(residual) if x is None else x
        torch.ops.millrace.attention_block(
            y,
            self._nothing if x is None else x,
            residual,
            self._norm,
            self._eps,
            self._qkv,
            self._qkv_bias,
            self._query_norm,
            self._key_norm,
            self._out,
            self._out_bias,
            self._rope,
            batch.positions,
            batch.cache_rows,
            cache.keys,
            cache.values,
            batch.block_tables,
            batch.query_starts,
            batch.context_lengths,
            self._num_heads,
            self._scale,
            self._window,
        )
        return y


class AmxMlp:
    """Norm, gates, activation and projection in one parallel region."""

    def __init__(self, weights: MlpWeights) -> None:
        self._norm, self._eps = weights.norm, weights.eps
        self._gate_up, self._gate_up_bias = _packed(weights.gate_up, gated=True)
        self._down, self._down_bias = _packed(weights.down)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, hidden], in `x`; `residual` is changed in place."""
        torch.ops.millrace.mlp_block(
            x,
            x,
            residual,
            self._norm,
            self._eps,
            self._gate_up,
            self._gate_up_bias,
            self._down,
            self._down_bias,
        )
        return x


def _packed(weights: LinearWeights, *, gated: bool = False) -> tuple[Tensor, Tensor]:
    packed = torch.ops.millrace.pack_panels(weights.weight.contiguous(), gated)
    return packed, _or_empty(weights.bias)


def _or_empty(values: Tensor | None) -> Tensor:
    """Operators know that something is missing by its size."""
    return torch.empty(0, dtype=torch.bfloat16) if values is None else values.contiguous()
