"""Halves of a decoder layer, composed of single operators, and layers composed of halves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from millrace_shard.kernels.base import (
    AttentionBlock,
    AttentionWeights,
    HeadNorms,
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
from millrace_shard.kernels.lora.adapted_linear import adapted
from millrace_shard.kernels.lora.lora_site import LoraSite
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.sampling_kernels import SamplingKernels


class ComposedBlocks:
    """A base for kernels without operators for halves of a layer; the subclass defines the single operators."""

    sampling: SamplingKernels | None = None

    def linear_from(self: Kernels, weights: LinearWeights) -> Linear:
        """A linear over a copy of the weight, with its adapters."""
        linear = self.linear(weights.weight.copied(), weights.bias)
        return self.adapted(linear, weights.lora)

    def adapted(self: Kernels, linear: Linear, site: LoraSite | None) -> Linear:
        """`linear` with the adapters of `site`, in plain torch; `linear` itself without a site."""
        return adapted(linear, site, deterministic=self.deterministic)

    def head(self: Kernels, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        """An output head that takes over `weight` [vocab, hidden]; its logits are float32."""
        return self.adapted(_Head(self.linear(weight)), lora)

    def attention(self: Kernels, weights: AttentionWeights) -> AttentionBlock:
        """The first half of a layer, of single operators."""
        return ComposedAttention(self, weights)

    def mlp(self: Kernels, weights: MlpWeights) -> MlpBlock:
        """The second half of a layer, of single operators."""
        return ComposedMlp(self, weights)

    def layers(self: Kernels, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        """Layers that call one half after the other."""
        return ComposedLayers(layers, reduce)


def normalise_heads(
    kernels: Kernels, qkv: Tensor, norms: HeadNorms, *, num_heads: int, num_kv_heads: int
) -> None:
    """Normalise the query heads and key heads of `qkv` [T, (num_heads + 2 * num_kv_heads) * head_dim] in place."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    queries, keys = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    queries.copy_(kernels.rms_norm(queries, norms.query, norms.eps))
    keys.copy_(kernels.rms_norm(keys, norms.key, norms.eps))


class ComposedAttention:
    """Norm, QKV, rope, attention and output projection as single operators."""

    def __init__(self, kernels: Kernels, weights: AttentionWeights) -> None:
        self._kernels = kernels
        self._norm, self._eps = weights.norm, weights.eps
        self._qkv = kernels.linear_from(weights.qkv)
        self._norms = None
        if weights.query_norm is not None and weights.key_norm is not None:
            self._norms = HeadNorms(weights.query_norm, weights.key_norm, weights.eps)
        self._out = kernels.linear_from(weights.out)
        self._rope = weights.rope
        self._num_heads, self._num_kv_heads = weights.num_heads, weights.num_kv_heads
        self._head_dim, self._window = weights.head_dim, weights.window

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        queries = self.queries(x, residual, batch, cache)
        return self.output(self.attend(queries, batch, cache))

    def new_residual(self, num_tokens: int) -> Tensor:
        """Zeros [num_tokens, hidden]."""
        return self._norm.new_zeros(num_tokens, len(self._norm))

    def queries(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """All work before the attention, which stores keys and values: the queries [T, num_heads, head_dim].

        `batch` needs positions and cache rows only. `residual` is changed in place.
        """
        kernels = self._kernels
        if x is None:
            normed = kernels.rms_norm(residual, self._norm, self._eps)
        else:
            normed = kernels.add_rms_norm(x, residual, self._norm, self._eps)
        return kernels.rope_store(
            self._qkv(normed),
            self._rope,
            batch,
            cache,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            norms=self._norms,
        )

    def attend(self, queries: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        """The attention of `queries` over the cache: [T, num_heads * head_dim]."""
        scale = self._head_dim**-0.5
        return self._kernels.attend(queries, batch, cache, scale=scale, window=self._window)

    def output(self, attended: Tensor) -> Tensor:
        """The output projection: [T, hidden]."""
        return self._out(attended)


class ComposedMlp:
    """Norm, gate and up projection, activation and down projection as single operators."""

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
    """Layers that make one call per half."""

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
    """A head that computes logits in the model's dtype and converts them to float32."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab] float32."""
        return self._linear(x).float()
