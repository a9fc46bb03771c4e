"""Kernels in plain torch, for any device: the oracle of the compiled kernels, and the fallback without a compiler.

In deterministic mode every matrix product has one fixed shape, so a row's bits depend neither on the composition of the
batch nor on the prefill chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.base import Kernels, LayerCache, Linear
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.kv_cache import new_layer_cache, store_rows
from millrace_shard.kernels.layer_blocks import ComposedBlocks
from millrace_shard.kernels.layer_weights import HeadNorms, NormWeights
from millrace_shard.kernels.plain_attention import KEY_CHUNK, ScoreRule, attend_fast, attend_fixed
from millrace_shard.kernels.ragged import RaggedBatch

LINEAR_ROWS = 32


class PlainLinear:
    """`F.linear` over all rows at once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return F.linear(x, self._weight, self._bias)


class FixedShapeLinear:
    """`F.linear` over LINEAR_ROWS rows at a time, padded, since libraries select a kernel by the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        num_rows = x.shape[0]
        if num_rows == 0:
            return x.new_empty(0, self._weight.shape[0])
        padded = F.pad(x, (0, 0, 0, -num_rows % LINEAR_ROWS))
        tiles = [
            F.linear(rows, self._weight, self._bias) for rows in torch.split(padded, LINEAR_ROWS)
        ]
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:num_rows]


def normalise_heads(
    kernels: Kernels, qkv: Tensor, norms: HeadNorms, *, num_heads: int, num_kv_heads: int
) -> None:
    """Normalise the query heads and key heads of `qkv` [T, (num_heads + 2 * num_kv_heads) * head_dim] in place."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    queries, keys = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    for each, norm in ((queries, norms.query), (keys, norms.key)):
        each.copy_(kernels.norm(each, norm))


class PlainKernels(ComposedBlocks):
    """Kernels in plain torch; caches are [num_blocks, block_size, num_kv_heads, head_dim]."""

    name = "plain"
    key_tile = KEY_CHUNK
    capturable = False

    def __init__(self, *, deterministic: bool, block_size: int = 16) -> None:
        """`block_size` must be a power of two up to 128, the length of a key chunk in deterministic mode."""
        if block_size not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ValueError(f"block_size must be a power of two up to 128, not {block_size}")
        self.deterministic = deterministic
        self.block_size = block_size

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Keep `weight` [out, in] and `bias` [out] as they are."""
        return (FixedShapeLinear if self.deterministic else PlainLinear)(weight, bias)

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
        """Uninitialised memory: no position is read before it is stored."""
        shape = (num_blocks, self.block_size, num_kv_heads, head_dim)
        form: dict[str, Any] = {"dtype": dtype, "device": device, "scales": scales}
        return new_layer_cache(shape, shape[:-1], **form, latent_dim=latent_dim)

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Zero `blocks`, although `attend` masks stale values and does not need it."""
        cache.zero(blocks)

    def zero_rows(self, cache: LayerCache, rows: Tensor, dtype: torch.dtype) -> None:
        """Store zeros at `rows`."""
        zeros = cache.keys.new_zeros((), dtype=dtype).expand(len(rows), *cache.keys.shape[2:])
        store_rows(zeros, zeros, rows, cache)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of the last axis."""
        return NormWeights(weight=weight, eps=eps, wide=weight.dtype != x.dtype).apply(x)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

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
        """Rotate in float32, in place; the queries returned are a view into `qkv`."""
        if norms is not None:
            normalise_heads(self, qkv, norms, num_heads=num_heads, num_kv_heads=num_kv_heads)
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        rotated = heads[:, : num_heads + num_kv_heads, : rope.shape[1]]
        cos, sin = rope[batch.positions].unsqueeze(1).chunk(2, dim=-1)
        left, right = rotated.float().chunk(2, dim=-1)
        rotated.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))
        self.store(keys, values, batch, cache)
        return queries

    def store(self, keys: Tensor, values: Tensor, batch: RaggedBatch, cache: LayerCache) -> None:
        """Store `keys` and `values` [T, num_kv_heads, head_dim] at `batch.cache_rows`."""
        store_rows(keys, values, batch.cache_rows, cache)

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
        attend = attend_fixed if self.deterministic else attend_fast
        return attend(queries, batch, cache, ScoreRule(scale, window, softcap, sinks))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` [T, 2 * inter], gates first."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (elementwise(F.silu, gate) if self.deterministic else F.silu(gate)) * up
