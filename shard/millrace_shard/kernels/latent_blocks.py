"""The first half of a layer over latents (MLA), of single operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from millrace_shard.kernels.base import (
    Kernels,
    LayerCache,
    Linear,
    added_and_normalised,
    normalised,
)
from millrace_shard.kernels.layer_weights import LatentWeights
from millrace_shard.kernels.ragged import RaggedBatch


class HeadByHead:
    """A linear for each head, each with a call."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the results of `x` [T, heads, in] to `out` [T, heads, out]."""
        for linear, inputs, results in zip(self._linears, x.unbind(1), out.unbind(1), strict=True):
            results.copy_(linear(inputs))


class LatentAttention:
    """Attention over latents (MLA) as single operators."""

    def __init__(self, kernels: Kernels, weights: LatentWeights) -> None:
        self._kernels = kernels
        self._norm = weights.norm
        self._first = kernels.linear_from(weights.first)
        self._queries_norm = weights.queries_norm
        self._queries = None if weights.queries is None else kernels.linear_from(weights.queries)
        self._latent_norm = weights.latent_norm
        self._num_heads, self._latent_dim, self._key_dim = weights.keys.shape
        self._rope_dim, self._value_dim = weights.rope_dim, weights.values.shape[1]
        self.attended_width = self._num_heads * self._latent_dim
        """Channels of the result of `attend`."""
        self._keys = kernels.heads_linear(weights.keys)
        self._values = kernels.heads_linear(weights.values)
        self._out = kernels.linear_from(weights.out)
        out = weights.out.weight
        self._new = partial(torch.zeros, dtype=out.dtype, device=out.device)
        self._hidden_size = out.shape[0]
        self._rotation, self._scale = weights.rotation, weights.scale

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
        """All work before the attention, which stores the latents: queries [T, num_heads, latent_dim + rope_dim].

        `batch` needs positions and cache rows only. `residual` is changed in place.
        """
        kernels, latent_dim = self._kernels, self._latent_dim
        first = self._first(added_and_normalised(kernels, x, residual, self._norm))
        width = latent_dim + self._rope_dim
        queries, shared = torch.tensor_split(first, [first.shape[1] - width], dim=1)
        if self._queries is not None:
            queries = self._queries(normalised(kernels, queries, self._queries_norm))
        by_head = queries.view(len(first), self._num_heads, -1)
        of_keys, turned = torch.tensor_split(by_head, [self._key_dim], dim=2)
        heads = first.new_empty(len(first), self._num_heads + 1, width)
        self._keys(of_keys, heads[:, :-1, :latent_dim])
        kernels.prepare_latents(
            heads, turned, shared, self._latent_norm, self._rotation, batch, cache
        )
        return heads[:, :-1]

    def attend(self, queries: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        """The sums of latents of `queries` over the cache: [T, num_heads * latent_dim]."""
        return self._kernels.attend(queries, batch, cache, scale=self._scale)

    def output(self, attended: Tensor) -> Tensor:
        """The values of heads, and the output projection: [T, hidden]."""
        values = attended.new_empty(len(attended), self._num_heads, self._value_dim)
        self._values(attended.view(len(attended), self._num_heads, -1), values)
        return self._out(values.flatten(1))
