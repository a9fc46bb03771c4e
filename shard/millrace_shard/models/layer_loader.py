"""Reads a rank's weights of a decoder, by the names of its family."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import AttentionBlock, Finish, Kernels, Layer, Linear, MlpBlock
from millrace_shard.kernels.layer_blocks import ResultNorm
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Rotation,
)
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.models.kv_scales import read_kv_scales
from millrace_shard.models.linear_loader import ExpertsLoader, LinearLoader, Part
from millrace_shard.models.rope import RopeTables
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    NormPlaces,
    NormSpec,
)
from millrace_shard.models.split import kv_heads_per_rank
from millrace_shard.weights.quantized.module_tensors import KINDS
from millrace_shard.weights.weights import Weights

logger = logging.getLogger(__name__)


class LayerLoader:
    """Reads embedding, layers, norms and head."""

    def __init__(
        self,
        spec: DecoderSpec,
        ropes: RopeTables,
        weights: Weights,
        kernels: Kernels,
        group: ProcessGroup,
        adapters: AdapterTable | None = None,
    ) -> None:
        """Raise WeightsError if the files have more layers than `spec`."""
        weights.check_layers(spec.num_stored_layers)
        self._spec = spec
        self._ropes = ropes
        self._weights = weights
        self._kernels = kernels
        self._group = group
        self._linears = LinearLoader(weights, group, adapters)
        self._experts = ExpertsLoader(spec.hidden_size, weights, self._linears, group)

    def embedding(self) -> Tensor:
        return self._vocabulary(self._spec.names.embedding)

    @property
    def has_head(self) -> bool:
        """Whether the model has an output head; only one whose file may lack it has none."""
        is_there = self._spec.tied_head or not self._spec.may_lack_head
        return is_there or self._file_has_head

    @property
    def _file_has_head(self) -> bool:
        return any(f"{self._spec.names.head}.{suffix}" in self._weights for suffix in KINDS)

    def head(self, embedding: Tensor) -> Linear:
        """The output head, which is the embedding if the config ties them, or if there is none.

        Without a head, logits only show whether a prompt's chunk has failed. As in transformers, a head that the file
        has is not tied if it is another one than the embedding.
        """
        spec = self._spec
        sizes = spec.vocab_size, spec.hidden_size
        if self._is_tied() or not self.has_head:
            stored = self._weights.made_head(embedding)
        else:
            stored = self._weights.head(f"{spec.names.head}.weight", *sizes)
        site = self._linears.head_site(spec.names.head, *sizes, stored.shape[0])
        parts = stored.tensors
        if parts is not None and len(parts) == 1:
            head = self._kernels.head(parts[0], site)
        else:
            head = self._kernels.head_from(LinearWeights(stored, None, site))
        self._weights.release()
        return head

    def _is_tied(self) -> bool:
        if not self._spec.tied_head:
            return False
        if not self._file_has_head:
            return True
        names, weights = self._spec.names, self._weights
        embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
        is_used = weights.has_codes(head) or weights.files.differ(embedding, head)
        if is_used or not weights.files.is_plain(head):
            logger.warning(
                "config.json ties the output head to the embedding, and the file has another head: it is %s",
                "used"
                if is_used
                else "not used, since config.json does not say how it is quantised",
            )
        return not is_used

    def last_norm(self) -> NormWeights:
        spec = self._spec
        return self._norm(spec.names.norm, spec.norm, spec.hidden_size)

    def kv_scales(self, index: int) -> tuple[float, float]:
        """The scales of keys and values of layer `index`, for a KV cache in fp8; 1 without any."""
        return read_kv_scales(self._weights, f"{self._spec.names.layers}.{index}.self_attn")

    def layer(self, index: int) -> Layer:
        prefix, layer = f"{self._spec.names.layers}.{index}.", self._spec.layers[index]
        names = self._spec.names.layer
        attention = self._attention(prefix, layer)
        self._weights.release()
        mlp = self._mlp(prefix, layer)
        self._weights.release()
        is_parallel = layer.norm_places is NormPlaces.PARALLEL
        return Layer(
            attention,
            mlp,
            after_attention=None
            if is_parallel
            else self._finish(prefix, names.after_attention, layer),
            after_mlp=self._finish(prefix, names.after_mlp, layer),
            is_parallel=is_parallel,
        )

    def _attention(self, prefix: str, layer: LayerSpec) -> AttentionBlock:
        spec, names = layer.attention, self._spec.names.layer
        query = Part(names.query, spec.num_heads, spec.head_dim)
        key, value = (
            Part(name, spec.num_kv_heads, spec.head_dim) for name in (names.key, names.value)
        )
        hidden, attended = self._spec.hidden_size, spec.num_heads * spec.head_dim
        ranks = self._group.world_size
        return self._kernels.attention(
            AttentionWeights(
                norm=self._optional_norm(prefix, names.before_attention, layer.norm),
                qkv=self._linears.columns(
                    prefix, (query, key, value), hidden, fused=names.qkv, bias=spec.qkv_bias
                ),
                out=self._linears.rows(prefix + names.out, attended, hidden, bias=spec.out_bias),
                num_heads=spec.num_heads // ranks,
                num_kv_heads=kv_heads_per_rank(spec, ranks),
                head_dim=spec.head_dim,
                scale=spec.scale,
                rotation=self._rotation(spec),
                head_norms=self._head_norms(prefix, spec),
                query_factors=self._ropes.query_factors(spec),
                mean_over_ranks=self._mean_over_ranks(),
                window=spec.window,
                softcap=spec.softcap,
                sinks=self._sinks(prefix, spec),
            )
        )

    def _mlp(self, prefix: str, layer: LayerSpec) -> MlpBlock:
        spec, names = layer.feed_forward, self._spec.names.layer
        is_parallel = layer.norm_places is NormPlaces.PARALLEL
        name = names.before_attention if is_parallel else names.before_mlp
        norm = self._optional_norm(prefix, name, layer.norm)
        if isinstance(spec, ExpertsSpec):
            return self._kernels.mixture(self._experts.read(prefix, spec, names.experts, norm))
        hidden, inter = self._spec.hidden_size, spec.intermediate_size
        gate_up = Part(names.gate, inter), Part(names.up, inter)
        return self._kernels.mlp(
            MlpWeights(
                norm=norm,
                gate_up=self._linears.columns(
                    prefix, gate_up, hidden, fused=names.gate_up, bias=spec.bias
                ),
                down=self._linears.rows(prefix + names.down, inter, hidden, bias=spec.bias),
                activation=spec.activation,
            )
        )

    def _finish(self, prefix: str, name: str | None, layer: LayerSpec) -> Finish | None:
        norm = self._optional_norm(prefix, name, layer.norm)
        if norm is None and layer.residual_multiplier == 1:
            return None
        return ResultNorm(self._kernels, norm, layer.residual_multiplier)

    def _sinks(self, prefix: str, spec: AttentionSpec) -> Tensor | None:
        if not spec.sinks:
            return None
        name = prefix + self._spec.names.layer.sinks
        return self._linears.own_heads(name, spec.num_heads, 1).float()

    def _rotation(self, spec: AttentionSpec) -> Rotation | None:
        if spec.rope is None:
            return None
        return Rotation(table=self._ropes.table(spec.rope), interleaved=spec.rope.interleaved)

    def _head_norms(self, prefix: str, spec: AttentionSpec) -> HeadNorms | None:
        head_norm, names = spec.head_norm, self._spec.names.layer
        if head_norm is None:
            return None

        def norm(name: str, heads: int) -> NormWeights:
            if head_norm.whole_width or head_norm.weight_per_head:
                return self._norm_of_heads(prefix + name, head_norm.norm, heads, spec.head_dim)
            return self._norm(prefix + name, head_norm.norm, spec.head_dim)

        return HeadNorms(
            query=norm(names.query_norm, spec.num_heads),
            key=norm(names.key_norm, spec.num_kv_heads),
            whole_width=head_norm.whole_width,
            after_rope=head_norm.after_rope,
        )

    def _norm_of_heads(self, name: str, norm: NormSpec, heads: int, head_dim: int) -> NormWeights:
        """A norm with weights for each head, of which the rank has its own."""
        weight = self._linears.own_heads(f"{name}.weight", heads, head_dim)
        return _norm_weights(weight, norm)

    def _optional_norm(self, prefix: str, name: str | None, norm: NormSpec) -> NormWeights | None:
        return None if name is None else self._norm(prefix + name, norm, self._spec.hidden_size)

    def _norm(self, name: str, norm: NormSpec, size: int) -> NormWeights:
        return _norm_weights(self._weights.replicated(f"{name}.weight", size), norm)

    def _mean_over_ranks(self) -> Callable[[Tensor], Tensor] | None:
        group = self._group
        if group.world_size == 1:
            return None
        return lambda x: group.all_reduce(x) / group.world_size

    def _vocabulary(self, name: str) -> Tensor:
        spec = self._spec
        return self._weights.vocabulary(f"{name}.weight", spec.vocab_size, spec.hidden_size)


def _norm_weights(weight: Tensor, norm: NormSpec) -> NormWeights:
    return NormWeights(
        weight=weight,
        eps=norm.eps,
        centred=norm.centred,
        plus_one=norm.plus_one,
        wide=norm.wide,
    )
