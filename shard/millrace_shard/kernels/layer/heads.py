"""Queries, keys and values of a layer before its attention: norms of heads, rotation, and the store of keys and values.

Kernels have an operator for the usual case. The other cases are composed here, in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.layer.layer_weights import AttentionWeights
from millrace_shard.kernels.layer.norm_weights import HeadNorms, NormWeights
from millrace_shard.kernels.ragged import RaggedBatch


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
