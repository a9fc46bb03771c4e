"""Kernels for x86 CPUs: compiled operators over pages of 64 positions, in bfloat16 or float32.

bfloat16 weights use operators over tiles, for half a layer or for all layers; float32 ones are reordered by oneDNN. A
row's bits depend neither on the composition of the batch, nor on the prefill chunks, nor on the number of threads.
Heads whose width is not a multiple of 32 are attended in blocks of rows instead. Only one thread may call the kernels;
torch.set_num_threads sets the number of threads of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.base import (
    AttentionBlock,
    Experts,
    HeadsLinear,
    Layer,
    LayerCache,
    Layers,
    Linear,
    MlpBlock,
    Reduce,
)
from millrace_shard.kernels.cpu import tile_blocks
from millrace_shard.kernels.cpu.packed_weight import is_one_matrix, runs
from millrace_shard.kernels.cpu.tile_blocks import (
    TILE_DEPTH,
    PanelLinear,
    TiledAttention,
    TiledHeadsLinear,
    TiledLayers,
    TiledMlp,
)
from millrace_shard.kernels.cpu.tile_experts import (
    TiledExperts,
    codes_agree,
    fits_experts,
    formats_of,
)
from millrace_shard.kernels.delta_rule import DeltaHeads, DeltaInputs, delta_rule
from millrace_shard.kernels.expert_weights import ExpertsWeights
from millrace_shard.kernels.kv_cache import is_coded, new_layer_cache
from millrace_shard.kernels.layer_blocks import ComposedBlocks, SideBySide
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LinearWeights,
    MlpWeights,
)
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.mamba2 import (
    ConvWeights,
    Mamba1Channels,
    Mamba2Heads,
    causal_conv,
    mamba1,
    mamba2,
)
from millrace_shard.kernels.plain import FixedShapeLinear, normalise_heads
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.states import LayerState
from millrace_shard.kernels.stored_weight import StoredWeight

ROWS_HINT = 64
"""The number of rows for which oneDNN chooses the layout; its influence on speed is small."""


class ReorderedLinear:
    """A float32 linear by oneDNN. A single row gets other bits, so it is padded to two."""

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
        if num_rows == 1:
            rows = F.pad(rows, (0, 0, 0, 1))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            rows, self._packed, self._bias, "none", [], ""
        )
        return y[:num_rows].view(*x.shape[:-1], self._out)


DTYPES = (torch.bfloat16, torch.float32)
HEAD_DIM_STEP = 8
HEAD_DIM_TILE = 32
"""Heads of a multiple of it are attended by tiles."""
HEAD_STEP = 16
"""Channels of heads of recurrent layers are multiples of it."""


class CpuKernels(ComposedBlocks):
    """Kernels for x86 CPUs; caches are [num_blocks, num_kv_heads, 64, head_dim], with pages as in pages.h."""

    name = "cpu"
    block_size = 64
    key_tile = 256
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
        if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return ReorderedLinear(weight, bias)
        return FixedShapeLinear(weight, bias)

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
        """Pack the weight as `head` does; products with codes are exact, or with activations in integers of 16 bits.

        AMX has no product of those that is faster than the exact one.
        """
        if self.tiles and weights.weight.dtype == torch.bfloat16:
            integer = self.integer and torch.ops.millrace.tile_unit() != "amx"
            return self._panels(weights, torch.float32, integer=integer, wide=True)
        return super().head_from(weights)

    def _panels(
        self, weights: LinearWeights, dtype: torch.dtype, *, integer: bool, wide: bool = False
    ) -> Linear:
        make = partial(PanelLinear, dtype=dtype, integer=integer, wide=wide)
        if not is_one_matrix(weights, integer=integer, wide=wide):
            return self.adapted(_apart(weights, make), weights.lora)
        if tile_blocks.fits_site(weights):
            return make(weights)
        return self.adapted(make(replace(weights, lora=None)), weights.lora)

    def attention(self, weights: AttentionWeights) -> AttentionBlock:
        """Pack the weights of the first half of a layer."""
        if self.tiles and tile_blocks.fits_attention(weights, integer=self.integer):
            return TiledAttention(weights, integer=self.integer)
        return super().attention(weights)

    def heads_linear(self, weight: Tensor) -> HeadsLinear:
        """Pack `weight` [heads, out, in] for one operator, or for one call per head where widths do not fit."""
        is_wide = weight.shape[1] % TILE_DEPTH == 0 and weight.shape[2] % TILE_DEPTH == 0
        if self.tiles and weight.dtype == torch.bfloat16 and is_wide:
            return TiledHeadsLinear(weight)
        return super().heads_linear(weight)

    def mlp(self, weights: MlpWeights) -> MlpBlock:
        """Pack the weights of the second half of a layer."""
        if self.tiles and tile_blocks.fits_mlp(weights, integer=self.integer):
            return TiledMlp(weights, integer=self.integer)
        return super().mlp(weights)

    def experts(self, weights: ExpertsWeights) -> Experts:
        """Pack the experts of a layer; codes stay codes."""
        if self.tiles and fits_experts(weights):
            first, weights = weights.peeked()
            is_one = is_one_matrix(first.gate_up, integer=self.integer, gated=True)
            if is_one and codes_agree(formats_of(first), integer=self.integer):
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
        latent_dim: int | None = None,
    ) -> LayerCache:
        """Uninitialised memory. Raises ValueError for an unsupported dtype, head dim or device."""
        is_known = dtype in DTYPES or is_coded(dtype)
        odd = head_dim % HEAD_DIM_STEP or (latent_dim or 0) % HEAD_DIM_STEP
        if not is_known or odd or device.type != "cpu":
            raise ValueError(f"no CPU cache of {dtype} with head_dim {head_dim} on {device}")
        shape = (num_blocks, num_kv_heads, self.block_size, head_dim)
        form: dict[str, Any] = {"dtype": dtype, "device": device, "scales": scales}
        return new_layer_cache(shape, shape[:-1], **form, latent_dim=latent_dim)

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Zero `blocks`, since `attend` multiplies values past the end of a sequence by 0."""
        cache.zero(blocks)

    def zero_rows(self, cache: LayerCache, rows: Tensor, dtype: torch.dtype) -> None:
        """Store zeros at `rows`, by one operator."""
        _, num_kv_heads, _, head_dim = cache.keys.shape
        zeros = torch.zeros(head_dim, dtype=dtype).expand(len(rows), num_kv_heads, head_dim)
        torch.ops.millrace.store(zeros, zeros, rows, cache.tensors)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of the last axis."""
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
        width = head_dim if cache.latent_dim is None else cache.latent_dim
        out = queries.new_empty(num_tokens, num_heads * width)
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
            batch.key_ends,
        )
        return out

    def attend_whole(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float
    ) -> Tensor:
        """Attention of all queries to all keys, [N, num_heads, head_dim] each, over its own cache.

        The queries belong to one sequence, and each of them sees all keys. Head dims are padded for tiles.
        """
        count, num_heads, head_dim = queries.shape
        num_blocks, padding = -(-count // self.block_size), (0, -head_dim % HEAD_DIM_TILE)
        cache = self.new_cache(
            num_blocks=num_blocks,
            num_kv_heads=num_heads,
            head_dim=head_dim + padding[1],
            dtype=queries.dtype,
            device=queries.device,
        )
        # Keys past the last are multiplied by 0.
        self.zero_blocks(cache, torch.tensor([num_blocks - 1]))
        padded = [F.pad(each, padding).contiguous() for each in (queries, keys, values)]
        torch.ops.millrace.store(*padded[1:], torch.arange(count), cache.tensors)
        out = torch.empty_like(padded[0])
        context = torch.tensor([0, count], dtype=torch.int32)
        torch.ops.millrace.attend(
            *(out.view(count, -1), padded[0], cache.tensors),
            torch.arange(num_blocks, dtype=torch.int32)[None],
            *(context, context[1:], scale, 0, 0.0, self.tiles, None),
            context[1:].expand(count).contiguous(),
        )
        return out[..., :head_dim].reshape(count, num_heads * head_dim)

    def delta_rule(
        self, inputs: DeltaInputs, heads: DeltaHeads, batch: RaggedBatch, state: LayerState
    ) -> Tensor:
        """[T, num_values * value_dim]; heads of other widths than multiples of 16 are computed in plain torch."""
        if heads.key_dim % HEAD_STEP or heads.value_dim % HEAD_STEP:
            return delta_rule(inputs, heads, batch, state)
        rows = batch.states
        assert rows is not None
        out = torch.empty_like(inputs.z)
        torch.ops.millrace.delta_rule(
            *(out, *inputs.tensors, heads.conv, heads.rates, heads.dt_bias, heads.norm, heads.eps),
            *(state.conv, state.state, rows.pages, batch.query_starts, rows.saved),
        )
        return out

    def causal_conv(
        self, x: Tensor, conv: ConvWeights, batch: RaggedBatch, state: LayerState
    ) -> Tensor:
        """[T, channels]; channels that are not a multiple of 16 are computed in plain torch."""
        if x.shape[1] % HEAD_STEP:
            return causal_conv(x, conv, batch, state)
        rows = batch.states
        assert rows is not None
        out, operands = torch.empty_like(x), (conv.weight, conv.bias, conv.silu, state.conv)
        places = rows.pages, batch.query_starts, rows.saved
        torch.ops.millrace.causal_conv(out, x.contiguous(), *operands, *places)
        return out

    def mamba2(
        self, mixed: Tensor, dt: Tensor, heads: Mamba2Heads, batch: RaggedBatch, state: LayerState
    ) -> Tensor:
        """[T, heads * head_dim] float32; heads of other widths than multiples of 16 are computed in plain torch."""
        _, num_heads, _, head_dim = state.state.shape
        if head_dim % HEAD_STEP:
            return mamba2(mixed, dt, heads, batch, state)
        rows = batch.states
        assert rows is not None
        out = mixed.new_empty(len(mixed), num_heads * head_dim, dtype=torch.float32)
        torch.ops.millrace.mamba2(
            *(out, mixed, dt, heads.rates, heads.dt_bias, heads.skip, *heads.limits),
            *(heads.num_groups, state.state, rows.pages, batch.query_starts, rows.saved),
        )
        return out

    def mamba1(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        channels: Mamba1Channels,
        batch: RaggedBatch,
        state: LayerState,
    ) -> Tensor:
        """[T, channels] float32; channels that are not a multiple of 16 are computed in plain torch."""
        if inputs[0].shape[1] % HEAD_STEP:
            return mamba1(inputs, channels, batch, state)
        rows = batch.states
        assert rows is not None
        out = torch.empty_like(inputs[0], dtype=torch.float32)
        torch.ops.millrace.mamba1(
            *(out, *inputs, channels.rates, channels.dt_bias, channels.skip),
            *(state.state, rows.pages, batch.query_starts, rows.saved),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` [T, 2 * inter], gates first."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        torch.ops.millrace.silu_mul(out, gate_up.contiguous())
        return out


def _apart(weights: LinearWeights, make: Callable[[LinearWeights], Linear]) -> Linear:
    """A linear for each run of parts that is one matrix, which is slower than a single linear."""
    stored, end, linears = weights.weight, 0, list[Linear]()
    stored.warn("computed apart: the parts of a fused linear have no common form")
    for parts in runs(stored.parts):
        begin, end = end, end + sum(part.shape[0] for part in parts)
        bias = None if weights.bias is None else weights.bias[begin:end]
        run = LinearWeights(stored.part_of(parts, begin), bias)
        linears.append(make(run))
    return SideBySide(linears)


def _stored(weight: Tensor, bias: Tensor | None) -> LinearWeights:
    return LinearWeights(StoredWeight.of(weight.contiguous()), bias)
