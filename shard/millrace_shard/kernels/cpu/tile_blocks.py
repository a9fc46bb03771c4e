"""Linears, halves of a layer and all layers as single operators over tiles, for bfloat16 models.

Weights are bfloat16, or codes of 4 or 8 bits. With `integer`, codes are multiplied with activations in int8, if they
stand for integers. A row's bits depend only on the row, since sums run over the whole of K in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace_shard.kernels.base import Layer, LayerCache
from millrace_shard.kernels.cpu.packed_weight import is_one_matrix, or_empty, packed
from millrace_shard.kernels.layer_weights import (
    Activation,
    AttentionWeights,
    LinearWeights,
    MlpWeights,
)
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.ragged import RaggedBatch

TILE_DEPTH = 32
"""Inputs per tile; widths that are read as tiles are multiples of it."""
TILE_COLUMNS = 16
MOST_PARTS = 3
"""Modules of one linear that may have adapters."""
ATTENTION_PARTS, MLP_PARTS = (3, 1), (2, 1)
"""Modules of the linears of each half, all of which may have adapters."""


def fits_attention(weights: AttentionWeights, *, integer: bool = False) -> bool:
    """Whether TiledAttention takes these weights."""
    weight = weights.qkv.weight
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[1] % TILE_DEPTH == 0
        and weights.head_dim % TILE_DEPTH == 0
        and weights.softcap is None
        and weights.chunks is None
        and weights.clip is None
        and not weights.has_gate
        and weights.has_plain_heads
        and _have_one_eps(weights)
        and weights.norm is not None
        and weights.norm.is_rms
        and _fit_sites(weights.qkv, weights.out, ATTENTION_PARTS)
        and is_one_matrix(weights.qkv, integer=integer)
    )


def _have_one_eps(weights: AttentionWeights) -> bool:
    """Whether the norms of heads, if any, have the epsilon of the layer's norm."""
    norms = weights.head_norms
    eps = {each.eps for each in (weights.norm, norms and norms.query, norms and norms.key) if each}
    return len(eps) == 1


def fits_mlp(weights: MlpWeights, *, integer: bool = False) -> bool:
    """Whether TiledMlp takes these weights."""
    weight = weights.gate_up.weight
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[1] % TILE_DEPTH == 0
        and weight.shape[0] % (2 * TILE_COLUMNS) == 0
        and weights.activation is Activation.SILU
        and set(weights.multipliers) == {1.0}
        and weights.norm is not None
        and weights.norm.is_rms
        and _fit_sites(weights.gate_up, weights.down, MLP_PARTS)
        and is_one_matrix(weights.gate_up, integer=integer, gated=True)
    )


def fits_site(weights: LinearWeights) -> bool:
    """Whether PanelLinear takes the adapters of these weights: its modules start at tiles and leave no output out."""
    if weights.lora is None:
        return True
    end = 0
    for part in weights.lora.parts:
        if part.first_output != end or end % TILE_COLUMNS:
            return False
        end += part.num_outputs
    return end == weights.weight.shape[0] and len(weights.lora.parts) <= MOST_PARTS


def _fit_sites(first: LinearWeights, second: LinearWeights, num_parts: tuple[int, int]) -> bool:
    """Whether the linears of a half both lack adapter sites, or have sites of modules that follow each other."""
    if first.lora is None or second.lora is None:
        return first.lora is second.lora
    counts = len(first.lora.parts), len(second.lora.parts)
    is_in_order = second.lora.first == first.lora.first + counts[0]
    return counts == num_parts and is_in_order and fits_site(first) and fits_site(second)


class PanelLinear:
    """A linear over a weight in panels of 32 outputs; results have `dtype`, bfloat16 or float32."""

    def __init__(
        self,
        weights: LinearWeights,
        *,
        dtype: torch.dtype = torch.bfloat16,
        integer: bool = False,
        wide: bool = False,
    ) -> None:
        self._out = weights.weight.shape[0]
        self._dtype = dtype
        self._packed, self._bias = packed(weights, integer=integer, wide=wide)
        self._lora = _site(weights)
        parts = () if self._lora is None else self._lora.parts
        self._lora_starts = [part.first_output for part in parts]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y = x.new_empty(*x.shape[:-1], self._out, dtype=self._dtype)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        operands = y.view(-1, self._out), rows, self._packed, self._bias
        if self._lora is None:
            torch.ops.millrace.panel_linear(*operands)
        else:
            torch.ops.millrace.panel_linear(
                *operands, *_adapters(self._lora), lora_starts=self._lora_starts
            )
        return y


class TiledHeadsLinear:
    """A linear for each head over weights in panels, in one parallel region."""

    def __init__(self, weight: Tensor) -> None:
        rows = weight.contiguous().flatten(0, 1)
        self._packed = torch.ops.millrace.pack_panels([rows], gated=False)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the results of `x` [T, heads, in] to `out` [T, heads, out], whose last axes are contiguous."""
        torch.ops.millrace.heads_linear(out, x, self._packed)


class TiledAttention:
    """Norm, QKV, rope, attention and output projection in one parallel region."""

    def __init__(self, weights: AttentionWeights, *, integer: bool = False) -> None:
        assert weights.norm is not None
        assert weights.rotation is not None
        self.eps = weights.norm.eps
        norms = weights.head_norms
        query_norm = or_empty(None if norms is None else norms.query.factors)
        key_norm = or_empty(None if norms is None else norms.key.factors)
        qkv = packed(weights.qkv, integer=integer)
        out = packed(weights.out, integer=integer)
        self.weights = (weights.norm.factors, *qkv, query_norm, key_norm, *out)
        """In the operators' order."""
        self.shapes = weights.qkv.weight.shape, weights.out.weight.shape, query_norm.shape
        self.rope = weights.rotation.table
        self.num_heads = weights.num_heads
        self.scale = weights.scale
        self.window = weights.window or 0
        self.lora = _site(weights.qkv)
        _site(weights.out)
        self.sinks = weights.sinks
        self._nothing = or_empty(None)

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """[T, hidden], in the memory of `x` if given; `residual` is changed in place."""
        y = torch.empty_like(residual) if x is None else x
        norm, *others = self.weights
        rope, rows = batch.rotated_by(self.rope)
        torch.ops.millrace.attention_block(
            y,
            self._nothing if x is None else x,
            residual,
            norm,
            self.eps,
            *others,
            rope,
            rows,
            batch.cache_rows,
            cache.tensors,
            batch.block_tables,
            batch.query_starts,
            batch.context_lengths,
            self.num_heads,
            self.scale,
            self.window,
            *_adapters(self.lora),
            sinks=self.sinks,
            key_ends=batch.key_ends,
        )
        return y


class TiledMlp:
    """Norm, gate and up projection, activation and down projection in one parallel region."""

    def __init__(self, weights: MlpWeights, *, integer: bool = False) -> None:
        assert weights.norm is not None
        self.eps = weights.norm.eps
        gate_up = packed(weights.gate_up, integer=integer, gated=True)
        down = packed(weights.down, integer=integer)
        self.weights = (weights.norm.factors, *gate_up, *down)
        """In the operators' order."""
        self.shapes = weights.gate_up.weight.shape, weights.down.weight.shape
        self.lora = _site(weights.gate_up)
        _site(weights.down)

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """[T, hidden], in the memory of `x` if given; `residual` is changed in place."""
        norm, *others = self.weights
        y = torch.empty_like(residual) if x is None else x
        added = or_empty(None) if x is None else x
        adapters = _adapters(self.lora)
        torch.ops.millrace.mlp_block(y, added, residual, norm, self.eps, *others, *adapters)
        return y


class TiledLayers:
    """All layers in one parallel region, since entering one takes as long as many phases of a step of few tokens."""

    def __init__(self, halves: Sequence[tuple[TiledAttention, TiledMlp]]) -> None:
        first, _ = halves[0]
        self._halves = halves
        self._weights = [weight for pair in halves for half in pair for weight in half.weights]
        self._eps, self._rope = first.eps, first.rope
        self._num_heads, self._scale = first.num_heads, first.scale
        self._windows = [attention.window for attention, _ in halves]
        self._lora = first.lora

    def __call__(
        self, residual: Tensor, batch: RaggedBatch, caches: Sequence[LayerCache]
    ) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        if len({cache.group for cache in caches}) > 1 or batch.key_ends is not None:
            return self._one_by_one(residual, batch, caches)
        batch = batch.of_group(caches[0].group)
        y = torch.empty_like(residual)
        rope, rows = batch.rotated_by(self._rope)
        torch.ops.millrace.decoder_layers(
            y,
            residual,
            self._weights,
            [each for cache in caches for each in cache.tensors],
            self._eps,
            rope,
            rows,
            batch.cache_rows,
            batch.block_tables,
            batch.query_starts,
            batch.context_lengths,
            self._num_heads,
            self._scale,
            self._windows,
            *_adapters(self._lora),
        )
        return y

    def _one_by_one(
        self, residual: Tensor, batch: RaggedBatch, caches: Sequence[LayerCache]
    ) -> Tensor:
        """The same for layers whose blocks have different tables, and for queries that see later keys."""
        x: Tensor | None = None
        for (attention, mlp), cache in zip(self._halves, caches, strict=True):
            x = mlp(attention(x, residual, batch.of_group(cache.group), cache), residual)
        assert x is not None, "a decoder has layers"
        return x


def tiled_halves(layers: Sequence[Layer]) -> list[tuple[TiledAttention, TiledMlp]] | None:
    """The halves of `layers`, if all are tiled and of one size, as TiledLayers needs; else None."""
    halves = [
        (layer.attention, layer.mlp)
        for layer in layers
        if layer.is_plain
        and isinstance(layer.attention, TiledAttention)
        and layer.attention.sinks is None
        and isinstance(layer.mlp, TiledMlp)
    ]
    if len(halves) < len(layers) or len({_kind(*pair) for pair in halves}) > 1:
        return None
    return halves if _are_in_order(halves) else None


def _are_in_order(halves: Sequence[tuple[TiledAttention, TiledMlp]]) -> bool:
    """Whether the modules with adapters, if any, follow each other as the operator numbers them."""
    sites = [half.lora for pair in halves for half in pair]
    if all(site is None for site in sites):
        return True
    expected = 0 if sites[0] is None else sites[0].first
    for site, num_parts in zip(sites, (ATTENTION_PARTS, MLP_PARTS) * len(halves), strict=True):
        if site is None or site.first != expected:
            return False
        expected += sum(num_parts)
    return True


def _kind(attention: TiledAttention, mlp: TiledMlp) -> tuple[object, ...]:
    """The properties that must be equal in all layers."""
    settings = attention.num_heads, attention.scale, attention.eps, mlp.eps
    return *settings, id(attention.rope), attention.shapes, mlp.shapes


def _site(weights: LinearWeights) -> LoraSite | None:
    """The site of the weights, whose adapters are packed for tiles from here on."""
    if weights.lora is not None:
        weights.lora.packing = "tiles"
    return weights.lora


def _adapters(site: LoraSite | None) -> tuple[()] | tuple[Tensor, Tensor, int]:
    """The arguments of operators for the adapters of the running rows; empty without adapters."""
    return () if site is None else (*site.operands, site.first)
