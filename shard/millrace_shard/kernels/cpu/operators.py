"""Kernels for x86 CPUs: compiled operators over pages of 64 positions, in bfloat16 or float32.

Linears are packed in blocks for our operator, or reordered by oneDNN. With the blocked form, and with oneDNN in
float32, a row's bits do not depend on other rows. With oneDNN in bfloat16 they do; it is up to a fifth faster from
about 100 rows on, and slower below.

bfloat16 weights use operators over tiles, for half a layer or for all layers. A row's bits depend neither on the
composition of the batch, nor on the prefill chunks, nor on the number of threads. Heads whose width is not a multiple
of 32 use ATen's brgemm instead, which needs AVX-512. Only one thread may call the kernels; torch.set_num_threads sets
the number of threads of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.base import (
    AttentionBlock,
    Experts,
    Layer,
    LayerCache,
    Layers,
    Linear,
    MlpBlock,
    Reduce,
)
from millrace_shard.kernels.cpu import tile_blocks
from millrace_shard.kernels.cpu.tile_blocks import (
    PanelLinear,
    TiledAttention,
    TiledLayers,
    TiledMlp,
)
from millrace_shard.kernels.cpu.tile_experts import (
    TiledExperts,
    codes_agree,
    fits_experts,
    formats_of,
)
from millrace_shard.kernels.expert_weights import ExpertsWeights
from millrace_shard.kernels.kv_cache import is_coded, new_layer_cache
from millrace_shard.kernels.layer_blocks import ComposedBlocks, normalise_heads
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LinearWeights,
    MlpWeights,
)
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.plain import FixedShapeLinear
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.stored_weight import StoredWeight

ROWS_HINT = 64
"""The number of rows for which oneDNN chooses the layout; its influence on speed is small."""


def pack(weight: Tensor, bias: Tensor | None, *, deterministic: bool) -> Linear:
    """The linear for the dtype and shape of `weight`; in plain torch where neither packed form fits."""
    exact = weight.dtype == torch.float32
    if (exact or not deterministic) and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ReorderedLinear(weight, bias)
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0:
        return BlockedLinear(weight, bias)
    return FixedShapeLinear(weight, bias)


class BlockedLinear:
    """A bfloat16 linear by our operator, which sums over `in` (even) in one order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._out = weight.shape[0]
        self._packed = torch.ops.millrace.pack_linear(weight.contiguous())
        self._bias = weight.new_empty(0) if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y = x.new_empty(*x.shape[:-1], self._out)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        torch.ops.millrace.packed_linear(y.view(-1, self._out), rows, self._packed, self._bias)
        return y


class ReorderedLinear:
    """A linear by oneDNN. In float32 a single row gets other bits, so it is padded to two."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._out = weight.shape[0]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)  # noqa: SLF001
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        rows = x.reshape(-1, x.shape[-1])
        num_rows = rows.shape[0]
        if num_rows == 0:
            return x.new_empty(*x.shape[:-1], self._out)
        if num_rows == 1 and x.dtype == torch.float32:
            rows = F.pad(rows, (0, 0, 0, 1))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            rows, self._packed, self._bias, "none", [], ""
        )
        return y[:num_rows].view(*x.shape[:-1], self._out)


DTYPES = (torch.bfloat16, torch.float32)
HEAD_DIM_STEP = 8


class CpuKernels(ComposedBlocks):
    """Kernels for x86 CPUs; caches are [num_blocks, num_kv_heads, 64, head_dim], with pages as in pages.h."""

    name = "cpu"
    block_size = 64
    capturable = True

    def __init__(self, *, deterministic: bool, tiles: bool = True, integer: bool = False) -> None:
        """With `tiles`, bfloat16 uses the operators over tiles. Operators must be loaded before the first use.

        With `integer`, activations of linears with quantised weights are int8 where the codes stand for integers.
        """
        self.deterministic = deterministic
        self.tiles = tiles
        self.integer = integer

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack `weight` [out, in] and keep `bias` [out]."""
        if self.tiles and weight.dtype == torch.bfloat16:
            return PanelLinear(_stored(weight, bias))
        return pack(weight, bias, deterministic=self.deterministic)

    def linear_from(self, weights: LinearWeights) -> Linear:
        """Pack the weight, directly from the mapped file if tiles take it."""
        if self.tiles and weights.weight.dtype == torch.bfloat16:
            return self._panels(weights, torch.bfloat16, integer=self.integer)
        return super().linear_from(weights)

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        """Pack `weight` [vocab, hidden]; with tiles, the logits are not rounded to bfloat16."""
        if self.tiles and weight.dtype == torch.bfloat16:
            return self.head_from(replace(_stored(weight, None), lora=lora))
        return super().head(weight, lora)

    def head_from(self, weights: LinearWeights) -> Linear:
        """Pack the weight as `head` does; products with codes are exact."""
        if self.tiles and weights.weight.dtype == torch.bfloat16:
            return self._panels(weights, torch.float32, integer=False)
        return super().head_from(weights)

    def _panels(self, weights: LinearWeights, dtype: torch.dtype, *, integer: bool) -> Linear:
        if tile_blocks.fits_site(weights):
            return PanelLinear(weights, dtype=dtype, integer=integer)
        linear = PanelLinear(replace(weights, lora=None), dtype=dtype, integer=integer)
        return self.adapted(linear, weights.lora)

    def attention(self, weights: AttentionWeights) -> AttentionBlock:
        """Pack the weights of the first half of a layer."""
        if self.tiles and tile_blocks.fits_attention(weights):
            return TiledAttention(weights, integer=self.integer)
        return super().attention(weights)

    def mlp(self, weights: MlpWeights) -> MlpBlock:
        """Pack the weights of the second half of a layer."""
        if self.tiles and tile_blocks.fits_mlp(weights):
            return TiledMlp(weights, integer=self.integer)
        return super().mlp(weights)

    def experts(self, weights: ExpertsWeights) -> Experts:
        """Pack the experts of a layer; codes stay codes."""
        if self.tiles and fits_experts(weights):
            first, weights = weights.peeked()
            if codes_agree(formats_of(first), integer=self.integer):
                return TiledExperts(weights, integer=self.integer)
        return super().experts(weights)

    def layers(self, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        """One operator for all layers, if all are tiled and there is no `reduce`; else one call per half."""
        halves = tile_blocks.tiled_halves(layers)
        if halves is None or reduce is not None:
            return super().layers(layers, reduce)
        return TiledLayers(halves)

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
        """Uninitialised memory. Raises ValueError for an unsupported dtype, head dim or device."""
        is_known = dtype in DTYPES or is_coded(dtype)
        if not is_known or head_dim % HEAD_DIM_STEP or device.type != "cpu":
            raise ValueError(f"no CPU cache of {dtype} with head_dim {head_dim} on {device}")
        shape = (num_blocks, num_kv_heads, self.block_size, head_dim)
        return new_layer_cache(shape, shape[:-1], dtype=dtype, device=device, scales=scales)

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Zero `blocks`, since `attend` multiplies values past the end of a sequence by 0."""
        cache.zero(blocks)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last axis in float32, cast back, then scale."""
        out = torch.empty(x.shape, dtype=x.dtype)
        rows = x if x.dim() == 3 and x.stride(2) == 1 else x.reshape(-1, 1, x.shape[-1])
        torch.ops.millrace.rms_norm(out, rows, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then its norm; all [T, hidden]."""
        out = torch.empty_like(residual)
        torch.ops.millrace.add_rms_norm(out, x.contiguous(), residual, weight, eps)
        return out

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
        """Rotate in place; store keys and values. The returned queries are a view into `qkv`."""
        if norms is not None:
            normalise_heads(self, qkv, norms, num_heads=num_heads, num_kv_heads=num_kv_heads)
        torch.ops.millrace.rope_store(
            qkv, rope, batch.positions, batch.cache_rows, cache.tensors, num_heads
        )
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        return heads[:, :num_heads]

    def store(self, keys: Tensor, values: Tensor, batch: RaggedBatch, cache: LayerCache) -> None:
        """Store `keys` and `values` [T, num_kv_heads, head_dim] at `batch.cache_rows`."""
        if keys.stride(2) != 1 or values.stride(2) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        torch.ops.millrace.store(keys, values, batch.cache_rows, cache.tensors)

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
        """Causal attention of `queries` [T, num_heads, head_dim]: [T, num_heads * head_dim]."""
        num_tokens, num_heads, head_dim = queries.shape
        if queries.stride(2) != 1 or queries.stride(1) != head_dim:
            queries = queries.contiguous()
        out = queries.new_empty(num_tokens, num_heads * head_dim)
        torch.ops.millrace.attend(
            out,
            queries,
            cache.tensors,
            batch.block_tables,
            batch.query_starts,
            batch.context_lengths,
            scale,
            window or 0,
            softcap or 0.0,
            self.tiles,
            sinks,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` [T, 2 * inter], gates first."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        torch.ops.millrace.silu_mul(out, gate_up.contiguous())
        return out


def _stored(weight: Tensor, bias: Tensor | None) -> LinearWeights:
    return LinearWeights(StoredWeight.of(weight.contiguous()), bias)
