"""Norms and rotation of queries and keys, of single operators, before keys and values are stored."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    NormWeights,
    Rotation,
)
from millrace_shard.kernels.ragged import RaggedBatch

POSITION_CHANNELS = 8
"""Channels that keys, queries and values have in addition, where scores depend on positions (ALiBi)."""
_PER_STEP = 128
"""Positions are the sum of a multiple of it and a rest, both of which 16 bits hold up to 32 768 positions."""


class PositionChannels:
    """Adds a key's position, times a slope of the head, to its scores by further channels of keys and queries.

    That differs from ALiBi's bias by a summand of all scores of a query, which softmax takes away.
    """

    def __init__(self, slopes: Tensor, scale: float, dtype: torch.dtype) -> None:
        """`slopes` is [num_heads] float32; scores are multiplied by `scale`."""
        left, terms = slopes / scale, list[Tensor]()
        for _ in range(3):
            terms.append(left.to(dtype))
            left = left - terms[-1].float()
        zero = torch.zeros_like(terms[0])
        pairs = (each for term in (*terms, zero) for each in (term, term))
        self._queries = torch.stack(tuple(pairs), dim=1)

    def queries(self, queries: Tensor) -> Tensor:
        """[T, num_heads, head_dim] with the further channels."""
        return torch.cat([queries, self._queries.expand(len(queries), -1, -1)], dim=2)

    def keys_values(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T, num_kv_heads, head_dim] of tokens at `positions` [T], each with the further channels."""
        rest = positions % _PER_STEP
        pair = torch.stack([positions - rest, rest], dim=1).to(keys.dtype)
        own = torch.cat([pair, pair, pair, torch.zeros_like(pair)], dim=1).unsqueeze(1)
        own = own.expand(-1, keys.shape[1], -1)
        return torch.cat([keys, own], dim=2), torch.cat([values, torch.zeros_like(own)], dim=2)


class HeadPreparation:
    """Prepares the heads of one layer."""

    def __init__(self, weights: AttentionWeights) -> None:
        self._num_heads, self._num_kv_heads = weights.num_heads, weights.num_kv_heads
        self._head_dim = weights.head_dim
        self._rotation, self._norms = weights.rotation, weights.head_norms
        self._query_factors = weights.query_factors
        self._mean_over_ranks = weights.mean_over_ranks
        self._clip = weights.clip
        self._reads_other, self._by_group = weights.reads_other, weights.by_group
        has_value_norm = weights.head_norms is not None and weights.head_norms.value is not None
        self._is_other = (
            has_value_norm
            or weights.by_group
            or weights.query_factors is not None
            or weights.slopes is not None
        )
        """Whether more is done than norms of queries and keys and their rotation."""
        self._positions = None
        if weights.slopes is not None:
            dtype = weights.out.weight.dtype
            self._positions = PositionChannels(weights.slopes, weights.scale, dtype)

    def __call__(
        self, kernels: Kernels, qkv: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """Change `qkv` [T, (num_heads + 2 * num_kv_heads) * head_dim] in place; store keys and values.

        Returns the queries [T, num_heads, head_dim], possibly as a view into `qkv`.
        """
        norms, rotation = self._norms, self._rotation
        if self._clip is not None:
            qkv = qkv.clamp_(-self._clip, self._clip)
        if self._reads_other:
            return self._queries_alone(qkv, batch)
        turned = batch
        if rotation is not None and batch.rotations is not None:
            table, rows = batch.rotations
            rotation, turned = replace(rotation, table=table), replace(batch, positions=rows)
        if rotation is not None and not self._is_other:
            sizes = self._num_heads, self._num_kv_heads
            prepared = kernels.prepare_heads(qkv, rotation, norms, turned, cache, sizes)
            if prepared is not None:
                return prepared
        queries, keys, values = self._turned(kernels, qkv, rotation, turned.positions)
        if self._query_factors is not None:
            factors = self._query_factors[batch.positions].view(-1, 1, 1)
            queries.copy_(queries * factors.to(queries.dtype))
        if self._positions is not None:
            keys, values = self._positions.keys_values(keys, values, batch.positions)
            queries = self._positions.queries(queries)
        kernels.store(keys, values, batch, cache)
        return queries

    def _turned(
        self, kernels: Kernels, qkv: Tensor, rotation: Rotation | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, head_dim] of `qkv`, normalised and rotated."""
        norms = self._norms
        if self._by_group:
            qkv = self._by_kind(qkv)
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        sizes = [self._num_heads, self._num_kv_heads, self._num_kv_heads]
        queries, keys, values = torch.split(heads, sizes, dim=1)
        if norms is not None and not norms.after_rope:
            self._normalise(kernels, queries, keys, norms)
        if norms is not None and norms.value is not None:
            values.copy_(kernels.norm(values, norms.value))
        if rotation is not None:
            rotation.apply(heads[:, : -self._num_kv_heads], positions)
        if norms is not None and norms.after_rope:
            self._normalise(kernels, queries, keys, norms)
        return queries, keys, values

    def _by_kind(self, qkv: Tensor) -> Tensor:
        """All queries, then all keys, then all values of `qkv`, which has them by key-value head."""
        groups = qkv.view(len(qkv), self._num_kv_heads, -1, self._head_dim)
        kinds = torch.split(groups, [self._num_heads // self._num_kv_heads, 1, 1], dim=2)
        return torch.cat([each.flatten(1) for each in kinds], dim=1)

    def _queries_alone(self, queries: Tensor, batch: RaggedBatch) -> Tensor:
        """The queries [T, num_heads, head_dim] of a layer that reads another layer's keys and values."""
        heads, norms = queries.view(len(queries), -1, self._head_dim), self._norms
        if norms is not None:
            heads = norms.query.apply(heads)
        if self._rotation is not None:
            self._rotation.apply(heads, batch.positions)
        return heads

    def _normalise(self, kernels: Kernels, queries: Tensor, keys: Tensor, norms: HeadNorms) -> None:
        for heads, norm in ((queries, norms.query), (keys, norms.key)):
            is_wide = norms.whole_width
            heads.copy_(self._over_width(heads, norm) if is_wide else kernels.norm(heads, norm))

    def _over_width(self, heads: Tensor, norm: NormWeights) -> Tensor:
        """The norm of `heads` [T, H, head_dim] over all heads of all ranks."""
        flat = heads.flatten(1)
        mean_square = flat.float().square().mean(-1, keepdim=True)
        if self._mean_over_ranks is not None:
            mean_square = self._mean_over_ranks(mean_square)
        return norm.apply(flat, mean_square).view(heads.shape)
