"""Reads a rank's weights of a decoder, by the names of its family."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import AttentionBlock, Finish, Kernels, Layer, Linear, MlpBlock
from millrace_shard.kernels.gemma4_blocks import LayerInputs
from millrace_shard.kernels.layer_blocks import ResultNorm
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LatentWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Rotation,
)
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.ragged import ChunkedBatches
from millrace_shard.kernels.recurrent_blocks import Beside
from millrace_shard.models.gemma4_loader import Gemma4Loader
from millrace_shard.models.kv_scales import read_kv_scales
from millrace_shard.models.linear_loader import ExpertsLoader, LinearLoader, Part
from millrace_shard.models.recurrent_loader import RecurrentLoader
from millrace_shard.models.rope import AxisRotations, RopeTables, longest_sequence
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    NormPlaces,
    NormSpec,
)
from millrace_shard.models.split import kv_heads_per_rank
from millrace_shard.weights.quantized.module_tensors import KINDS
from millrace_shard.weights.safetensor_files import LAYER
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
        self.ropes = ropes
        self._weights = weights
        self._kernels = kernels
        self._group = group
        self._linears = LinearLoader(weights, group, adapters)
        self._experts = ExpertsLoader(spec.hidden_size, weights, self._linears, group)
        self._recurrent = RecurrentLoader(spec, weights, kernels, self._linears, group)
        self._gemma4 = Gemma4Loader(
            spec, weights, kernels, self._linears, self._experts, group, self._norm
        )
        self._chunks = dict[int, ChunkedBatches]()
        self._longest = longest_sequence(spec)
        self._log_what_is_left()

    def _log_what_is_left(self) -> None:
        """Say which layers of the file are not computed, and that ranks do not share latents."""
        spec, count, names = self._spec, len(self._spec.layers), self._weights.stored_names()
        numbers = (int(match[1]) for match in map(LAYER.match, names) if match)
        if max(numbers, default=0) >= count:
            logger.info(
                "layers from %d on predict further tokens: --speculator mtp drafts by them", count
            )
        elif any(name.startswith("mtp.") for name in names):
            logger.info("an MTP layer predicts further tokens: --speculator mtp drafts by it")
        if self._group.world_size > 1 and spec.has_latents:
            logger.info(
                "each of %d shards keeps the latents of all heads: more shards save weights, not KV",
                self._group.world_size,
            )

    def embedding(self) -> Tensor:
        return self._vocabulary(self._spec.names.embedding)

    def layer_inputs(self) -> tuple[Tensor, LayerInputs] | None:
        """The rank's part of a table, and what makes a further input of every layer of its rows; None without one."""
        return self._gemma4.layer_inputs()

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
        if spec.head_normalised:
            if parts is None:
                raise UnsupportedModel("a quantised head is not supported for baichuan")
            parts = (F.normalize(torch.cat(parts)),)
        if parts is not None and len(parts) == 1:
            head = self._kernels.head(parts[0], site)
        else:
            head = self._kernels.head_from(LinearWeights(stored, None, site))
        self._weights.release()
        return head

    def head_bias(self) -> Tensor | None:
        """[vocab] float32; None if the head has none."""
        name, size = f"{self._spec.names.head}.bias", self._spec.vocab_size
        if not self._spec.head_bias:
            return None
        return self._weights.replicated(name, size, dtype=torch.float32)

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

    def embedding_norm(self) -> NormWeights | None:
        """Of the embeddings; None if they stay as they are."""
        spec = self._spec
        if spec.embedding_norm is None:
            return None
        return self._norm(spec.names.embedding_norm, spec.embedding_norm, spec.hidden_size)

    def last_norm(self) -> NormWeights:
        return self.norm(self._spec.names.norm)

    def norm(self, name: str) -> NormWeights:
        """The norm `name` of hidden states."""
        return self._norm(name, self._spec.norm, self._spec.hidden_size)

    def kv_scales(self, index: int) -> tuple[float, float]:
        """The scales of keys and values of layer `index`, for a KV cache in fp8; 1 without any."""
        return read_kv_scales(self._weights, f"{self._spec.names.layers}.{index}.self_attn")

    def layer(self, index: int, prefix: str | None = None, inputs: int | None = None) -> Layer:
        """Layer `index`, whose names begin with `prefix`; its attention has other `inputs` than hidden channels."""
        prefix, layer = prefix or f"{self._spec.names.layers}.{index}.", self._spec.layers[index]
        names = self._spec.names.layer
        attention = self._first_half(index, prefix, layer, inputs)
        self._weights.release()
        mlp = self._mlp(prefix, layer) if layer.has_feed_forward else None
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
            end=self._gemma4.end(index, prefix, layer),
        )

    def _first_half(
        self, index: int, prefix: str, layer: LayerSpec, inputs: int | None
    ) -> AttentionBlock | None:
        recurrent, beside = layer.recurrent, layer.beside
        if recurrent is None:
            return self._attention(prefix, layer, inputs) if layer.attends else None
        factor = 1.0 if beside is None else beside.recurrent_input
        norm = self._before(prefix, layer, factor)
        block = self._recurrent.block(index, prefix, recurrent, norm)
        if beside is None:
            return block
        factors = beside.attention_result, beside.recurrent_result
        return Beside(self._attention(prefix, layer), block, factors)

    def _attention(
        self, prefix: str, layer: LayerSpec, inputs: int | None = None
    ) -> AttentionBlock:
        spec, names = layer.attention, self._spec.names.layer
        if spec.latent is not None:
            return self._latent_attention(prefix, layer, spec.latent)
        query = Part(names.query, spec.num_heads, spec.head_dim * (2 if spec.gated else 1))
        key, value = (
            Part(name, spec.num_kv_heads, spec.head_dim)
            for name in (names.key, names.key if spec.values_are_keys else names.value)
        )
        parts = (query, key, value) if spec.kv_source is None else (query,)
        if spec.by_group:
            per_group = spec.num_heads // spec.num_kv_heads + 2
            parts = (Part("", spec.num_kv_heads, per_group * spec.head_dim),)
        hidden, attended = self._spec.hidden_size, spec.num_heads * spec.head_dim
        ranks = self._group.world_size
        return self._kernels.attention(
            AttentionWeights(
                norm=self._before(
                    prefix, layer, layer.beside.attention_input if layer.beside else 1.0
                ),
                qkv=self._linears.columns(
                    prefix, parts, inputs or hidden, fused=names.qkv, bias=spec.qkv_bias
                ),
                out=self._linears.rows(prefix + names.out, attended, hidden, bias=spec.out_bias),
                num_heads=spec.num_heads // ranks,
                num_kv_heads=kv_heads_per_rank(spec, ranks),
                head_dim=spec.head_dim,
                scale=spec.scale,
                rotation=self._rotation(spec),
                head_norms=self._head_norms(prefix, spec),
                query_factors=self.ropes.query_factors(spec, self._longest),
                mean_over_ranks=self._mean_over_ranks(),
                window=spec.window,
                chunks=None if spec.chunk is None else self._chunked_batches(spec.chunk),
                softcap=spec.softcap,
                clip=spec.clip,
                sinks=self._sinks(prefix, spec),
                has_gate=spec.gated,
                slopes=self._slopes(spec),
                by_group=spec.by_group,
                reads_other=spec.kv_source is not None,
            )
        )

    def _chunked_batches(self, chunk: int) -> ChunkedBatches:
        """The same for all layers. Raises UnsupportedModel for chunks that are no whole blocks."""
        size = self._kernels.block_size
        if chunk % size:
            raise UnsupportedModel(
                f"attention_chunk_size={chunk} is not a multiple of {size}, the positions of a KV block"
            )
        return self._chunks.setdefault(chunk, ChunkedBatches(chunk, size))

    def _before(self, prefix: str, layer: LayerSpec, factor: float = 1.0) -> NormWeights | None:
        """The norm before the first half, whose result is multiplied by `factor`."""
        norm = self._optional_norm(prefix, self._spec.names.layer.before_attention, layer.norm)
        if norm is None or factor == 1:
            return norm
        return replace(norm, weight=norm.weight.float() * factor, wide=True)

    def _latent_attention(
        self, prefix: str, layer: LayerSpec, latent: LatentSpec
    ) -> AttentionBlock:
        """Every rank has the whole latents and the queries, keys and values of its heads."""
        spec, names = layer.attention, self._spec.names.layer
        of_latent, hidden, linears = names.latent, self._spec.hidden_size, self._linears
        width = latent.dim + latent.rope_dim
        heads = spec.num_heads, latent.head_width
        queries_norm, queries, query = None, None, Part(names.query, *heads)
        if latent.query_dim is not None:
            query = Part(of_latent.queries_in, 1, latent.query_dim)
            queries_norm = self._norm(prefix + of_latent.queries_norm, latent.norm, query.unit_size)
        first = linears.columns(
            prefix, (query, Part(of_latent.latent, 1, width)), hidden, fused=None, bias=latent.bias
        )
        if latent.query_dim is not None:
            outs = (Part(of_latent.queries_out, *heads),)
            queries = linears.columns(prefix, outs, latent.query_dim, fused=None, bias=False)
        rows = latent.key_dim + latent.value_dim
        made = linears.dense(prefix + of_latent.heads, spec.num_heads, rows, latent.dim)
        keys, values = torch.split(made, [latent.key_dim, latent.value_dim], dim=1)
        return self._kernels.latent_attention(
            LatentWeights(
                norm=self._optional_norm(prefix, names.before_attention, layer.norm),
                first=first,
                queries_norm=queries_norm,
                queries=queries,
                latent_norm=self._norm(prefix + of_latent.latent_norm, latent.norm, latent.dim),
                keys=keys.transpose(1, 2),
                values=values,
                out=linears.rows(prefix + names.out, spec.out_width, hidden, bias=spec.out_bias),
                rope_dim=latent.rope_dim,
                scale=spec.scale,
                rotation=self._rotation(spec),
            )
        )

    def _mlp(self, prefix: str, layer: LayerSpec) -> MlpBlock:
        spec, names = layer.feed_forward, self._spec.names.layer
        is_parallel = layer.norm_places is NormPlaces.PARALLEL
        name = names.before_mlp or (names.before_attention if is_parallel else None)
        norm = self._optional_norm(prefix, name, layer.norm)
        if isinstance(spec, ExpertsSpec):
            return self._kernels.mixture(self._experts.read(prefix, spec, names.experts, norm))
        hidden, inter = self._spec.hidden_size, spec.intermediate_size
        gate_up = [Part(names.gate, inter), Part(names.up, inter)]
        if not spec.activation.has_gate:
            del gate_up[0]
        mlp = MlpWeights(
            norm=norm,
            gate_up=self._linears.columns(
                prefix, gate_up, hidden, fused=names.gate_up, bias=spec.bias
            ),
            down=self._linears.rows(prefix + names.down, inter, hidden, bias=spec.bias),
            activation=spec.activation,
            multipliers=spec.multipliers,
        )
        if layer.side_experts is not None:
            return self._gemma4.beside(prefix, mlp, layer.side_experts, layer.norm)
        return self._kernels.mlp(mlp)

    def _finish(self, prefix: str, name: str | None, layer: LayerSpec) -> Finish | None:
        norm = self._optional_norm(prefix, name, layer.norm)
        if norm is None and layer.residual_multiplier == 1:
            return None
        return ResultNorm(self._kernels, norm, layer.residual_multiplier)

    def _slopes(self, spec: AttentionSpec) -> Tensor | None:
        if not spec.slopes:
            return None
        share = spec.num_heads // self._group.world_size
        own = spec.slopes[self._group.rank * share :][:share]
        return torch.tensor(own, device=self.ropes.device)

    def _sinks(self, prefix: str, spec: AttentionSpec) -> Tensor | None:
        if not spec.sinks:
            return None
        name = prefix + self._spec.names.layer.sinks
        return self._linears.own_heads(name, spec.num_heads, 1).float()

    def axes(self) -> AxisRotations | None:
        """What rotates by three axes; None if no layer does."""
        ropes = {layer.attention.rope for layer in self._spec.layers if layer.attends}
        return next(
            (AxisRotations.of(rope, self.ropes) for rope in ropes if rope and rope.axes), None
        )

    def _rotation(self, spec: AttentionSpec) -> Rotation | None:
        if spec.rope is None:
            return None
        return Rotation(table=self.ropes.table(spec.rope), interleaved=spec.rope.interleaved)

    def _head_norms(self, prefix: str, spec: AttentionSpec) -> HeadNorms | None:
        head_norm, names = spec.head_norm, self._spec.names.layer
        if head_norm is None:
            return None

        def norm(name: str, heads: int) -> NormWeights:
            if not head_norm.has_weights:
                ones = torch.ones(
                    spec.head_dim, dtype=self._weights.dtype, device=self.ropes.device
                )
                return _norm_weights(ones, head_norm.norm)
            if head_norm.whole_width or head_norm.weight_per_head:
                return self._norm_of_heads(prefix + name, head_norm.norm, heads, spec.head_dim)
            return self._norm(prefix + name, head_norm.norm, spec.head_dim)

        query, value = norm(names.query_norm, spec.num_heads), None
        if head_norm.values:
            value = replace(query, weight=torch.ones_like(query.weight))
        has_keys = spec.kv_source is None
        return HeadNorms(
            query=query,
            key=norm(names.key_norm, spec.num_kv_heads) if has_keys else query,
            value=value,
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
        weights = _norm_weights(self._weights.replicated(f"{name}.weight", size), norm)
        if not norm.bias:
            return weights
        return replace(weights, bias=self._weights.replicated(f"{name}.bias", size))

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
