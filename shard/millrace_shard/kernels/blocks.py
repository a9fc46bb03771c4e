"""The halves of a decoder layer put together from a device's single operations, and a decoder's layers from halves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from millrace_shard.kernels.base import (
    AttentionBlock,
    AttentionWeights,
    Kernels,
    Layer,
    LayerCache,
    Layers,
    Linear,
    LinearWeights,
    MlpBlock,
    MlpWeights,
    Reduce,
)
from millrace_shard.kernels.ragged import RaggedBatch


class ComposedBlocks:
    """For kernels that have no operator for half a layer: mix in before what has the single operations."""

    def linear_from(self: Kernels, weights: LinearWeights) -> Linear:
        """Of a copy of the weight."""
        return self.linear(weights.weight.kept(), weights.bias)

    def head(self: Kernels, weight: Tensor) -> Linear:
        """Take over `weight` [vocab, hidden]; the logits it yields are float32."""
        return _Head(self.linear(weight))

    def attention(self: Kernels, weights: AttentionWeights) -> AttentionBlock:
        """Keep the weights of half a layer."""
        return ComposedAttention(self, weights)

    def mlp(self: Kernels, weights: MlpWeights) -> MlpBlock:
        """Keep the weights of the other half."""
        return ComposedMlp(self, weights)

    def layers(self: Kernels, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        """One half after the other."""
        return ComposedLayers(layers, reduce)


class ComposedAttention:
    """Norm, QKV, rope, attention and output projection, one after another."""

    def __init__(self, kernels: Kernels, weights: AttentionWeights) -> None:
        self._kernels = kernels
        self._norm, self._eps = weights.norm, weights.eps
        self._qkv = kernels.linear_from(weights.qkv)
        self._query_norm, self._key_norm = weights.query_norm, weights.key_norm
        self._out = kernels.linear_from(weights.out)
        self._rope = weights.rope
        self._num_heads, self._num_kv_heads = weights.num_heads, weights.num_kv_heads
        self._head_dim, self._window = weights.head_dim, weights.window

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        kernels = self._kernels
        if x is None:
            normed = kernels.rms_norm(residual, self._norm, self._eps)
        else:
            normed = kernels.add_rms_norm(x, residual, self._norm, self._eps)
        qkv = self._qkv(normed)
        self._norm_heads(qkv)
        queries = kernels.rope_store(
            qkv,
            self._rope,
            batch,
            cache,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
        )
        scale = self._head_dim**-0.5
        return self._out(kernels.attend(queries, batch, cache, scale=scale, window=self._window))

    def _norm_heads(self, qkv: Tensor) -> None:
        if self._query_norm is None or self._key_norm is None:
            return
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        queries = heads[:, : self._num_heads]
        keys = heads[:, self._num_heads : self._num_heads + self._num_kv_heads]
        queries.copy_(self._kernels.rms_norm(queries, self._query_norm, self._eps))
        keys.copy_(self._kernels.rms_norm(keys, self._key_norm, self._eps))


class ComposedMlp:
    """Norm, gates, activation and projection, one after another."""

    def __init__(self, kernels: Kernels, weights: MlpWeights) -> None:
        self._kernels = kernels
        self._norm, self._eps = weights.norm, weights.eps
        self._gate_up = kernels.linear_from(weights.gate_up)
        self._down = kernels.linear_from(weights.down)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        normed = self._kernels.add_rms_norm(x, residual, self._norm, self._eps)
        return self._down(self._kernels.silu_mul(self._gate_up(normed)))


class ComposedLayers:
    """A call for each half of a layer."""

    def __init__(self, layers: Sequence[Layer], reduce: Reduce | None) -> None:
        self._layers = layers
        self._reduce = reduce or _as_it_is

    def __call__(
        self, residual: Tensor, batch: RaggedBatch, caches: Sequence[LayerCache]
    ) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        x: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x = self._reduce(layer.attention(x, residual, batch, cache))
            x = self._reduce(layer.mlp(x, residual))
        assert x is not None, "a decoder has layers"
        return x


def _as_it_is(x: Tensor) -> Tensor:
    return x


class _Head:
    """Logits in the model's dtype, widened."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab] float32."""
        return self._linear(x).float()
