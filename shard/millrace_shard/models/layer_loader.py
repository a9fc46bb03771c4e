"""Reads a rank's weights of a decoder, by the names of its family."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import (
    AttentionBlock,
    AttentionWeights,
    Kernels,
    Layer,
    Linear,
    LinearWeights,
    MlpBlock,
    MlpWeights,
)
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.lora.lora_site import LoraPart, LoraSite
from millrace_shard.model_loader.weights import Columns, Weights
from millrace_shard.models.rope_tables import RopeTables
from millrace_shard.models.spec.decoder_spec import DecoderSpec, LayerSpec
from millrace_shard.models.split import kv_heads_per_rank


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
        self._spec = spec
        self._ropes = ropes
        self._weights = weights
        self._kernels = kernels
        self._group = group
        self._adapters = adapters

    def embedding(self) -> Tensor:
        """The rank's rows of the embedding."""
        return self._vocabulary(self._spec.names.embedding)

    def head(self, embedding: Tensor) -> Linear:
        """The output head, which is the embedding if the config ties them."""
        spec = self._spec
        weight = embedding if spec.tied_head else self._vocabulary(spec.names.head)
        return self._kernels.head(weight, self._head_site(len(weight)))

    def layer(self, index: int) -> Layer:
        """Load layer `index`."""
        prefix, layer = f"{self._spec.names.layers}.{index}", self._spec.layers[index]
        attention = self._attention(prefix, layer)
        self._weights.release()
        mlp = self._mlp(prefix, layer)
        self._weights.release()
        return Layer(attention, mlp)

    def _attention(self, prefix: str, layer: LayerSpec) -> AttentionBlock:
        spec, names, world_size = layer.attention, self._spec.names.layer, self._group.world_size
        kv = (spec.num_kv_heads, spec.head_dim)
        qkv = [
            Columns(f"{prefix}.{names.query}", spec.num_heads, spec.head_dim),
            Columns(f"{prefix}.{names.key}", *kv),
            Columns(f"{prefix}.{names.value}", *kv),
        ]
        query_norm, key_norm = (
            self.norm(f"{prefix}.{name}", spec.head_dim) if spec.head_norm else None
            for name in (names.query_norm, names.key_norm)
        )
        attended = spec.num_heads * spec.head_dim
        assert spec.rope is not None
        return self._kernels.attention(
            AttentionWeights(
                norm=self.norm(f"{prefix}.{names.before_attention}", self._spec.hidden_size),
                eps=layer.norm.eps,
                qkv=self._columns(qkv, bias=spec.qkv_bias),
                query_norm=query_norm,
                key_norm=key_norm,
                out=self._rows(f"{prefix}.{names.out}", attended, bias=spec.out_bias),
                rope=self._ropes.table(spec.rope),
                num_heads=spec.num_heads // world_size,
                num_kv_heads=kv_heads_per_rank(spec, world_size),
                head_dim=spec.head_dim,
                window=spec.window,
            )
        )

    def _mlp(self, prefix: str, layer: LayerSpec) -> MlpBlock:
        spec, names = layer.feed_forward, self._spec.names.layer
        gate_up = [
            Columns(f"{prefix}.{name}", spec.intermediate_size) for name in (names.gate, names.up)
        ]
        return self._kernels.mlp(
            MlpWeights(
                norm=self.norm(f"{prefix}.{names.before_mlp}", self._spec.hidden_size),
                eps=layer.norm.eps,
                gate_up=self._columns(gate_up, bias=spec.bias),
                down=self._rows(f"{prefix}.{names.down}", spec.intermediate_size, bias=spec.bias),
            )
        )

    def norm(self, name: str, size: int) -> Tensor:
        """The scales of a norm, [size]."""
        return self._weights.replicated(f"{name}.weight", size)

    def _vocabulary(self, name: str) -> Tensor:
        spec = self._spec
        return self._weights.vocabulary(f"{name}.weight", spec.vocab_size, spec.hidden_size)

    def _columns(self, parts: Sequence[Columns], *, bias: bool) -> LinearWeights:
        def named(kind: str) -> list[Columns]:
            return [Columns(f"{p.name}.{kind}", p.units, p.unit_size) for p in parts]

        return LinearWeights(
            self._weights.columns(named("weight"), self._spec.hidden_size),
            self._weights.biases(named("bias")) if bias else None,
            self._column_site(parts),
        )

    def _rows(self, name: str, inputs: int, *, bias: bool) -> LinearWeights:
        """A row-parallel linear. The results of the ranks are summed, so only rank 0 adds the bias."""
        hidden = self._spec.hidden_size
        adds = bias and self._group.rank == 0
        return LinearWeights(
            self._weights.rows(f"{name}.weight", hidden, inputs),
            self._weights.replicated(f"{name}.bias", hidden) if adds else None,
            self._row_site(name, inputs),
        )

    def _column_site(self, parts: Sequence[Columns]) -> LoraSite | None:
        if self._adapters is None:
            return None
        inputs, found, first = self._spec.hidden_size, list[LoraPart](), 0
        for part in parts:
            start, end = part.span(self._group.rank, self._group.world_size)
            found.append(
                LoraPart(
                    name=part.name,
                    inputs=inputs,
                    outputs=part.size,
                    input_range=(0, inputs),
                    output_range=(start, end),
                    first_output=first,
                )
            )
            first += end - start
        return self._adapters.add_site(found)

    def _row_site(self, name: str, inputs: int) -> LoraSite | None:
        if self._adapters is None:
            return None
        hidden, rank = self._spec.hidden_size, self._group.rank
        share = inputs // self._group.world_size
        part = LoraPart(
            name=name,
            inputs=inputs,
            outputs=hidden,
            input_range=(rank * share, (rank + 1) * share),
            output_range=(0, hidden),
            adds_bias=rank == 0,
        )
        return self._adapters.add_site([part])

    def _head_site(self, share: int) -> LoraSite | None:
        if self._adapters is None:
            return None
        hidden, vocab_size = self._spec.hidden_size, self._spec.vocab_size
        start = min(self._group.rank * share, vocab_size)
        part = LoraPart(
            name=self._spec.names.head,
            inputs=hidden,
            outputs=vocab_size,
            input_range=(0, hidden),
            output_range=(start, min(start + share, vocab_size)),
        )
        return self._adapters.add_site([part], is_head=True)
