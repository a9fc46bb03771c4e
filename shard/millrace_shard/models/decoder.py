"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3), over any kernels and any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
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
from millrace_shard.kernels.lora.adapter_rows import AdapterRows
from millrace_shard.kernels.lora.adapter_table import AdapterTable, running
from millrace_shard.kernels.lora.lora_site import LoraPart, LoraSite
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_loader.weights import Columns, Weights
from millrace_shard.models.architecture import Architecture
from millrace_shard.models.interface import KVGeometry, MakeLayers, ModelInfo


class Decoder:
    """A CausalModel; each rank holds its heads, its intermediate channels and its part of the vocabulary."""

    def __init__(
        self,
        arch: Architecture,
        info: ModelInfo,
        rope: Tensor,
        *,
        weights: Weights,
        kernels: Kernels,
        group: ProcessGroup,
        adapters: AdapterTable | None = None,
    ) -> None:
        """Load this rank's weights; `rope` is the table of `rope_table` on the model's device.

        The linears become sites of `adapters`.
        """
        self.info = info
        self.hidden_size = arch.hidden_size
        self._arch = arch
        self._kernels = kernels
        self._group = group
        self._adapters = adapters
        num_kv_heads = arch.kv_heads_per_rank(group.world_size)
        self.geometry = KVGeometry(((num_kv_heads, arch.head_dim),) * arch.num_layers)

        loader = LayerLoader(arch, rope, weights, kernels, group, adapters)
        self._embedding = loader.vocabulary("model.embed_tokens.weight")
        self._layers = [loader.layer(i) for i in range(arch.num_layers)]
        self.run_layers = self._runner_of(self._layers)
        self._norm = loader.norm("model.norm", arch.hidden_size)
        self._head = loader.head(self._embedding)

    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Logits of `batch.logit_rows` over the whole vocabulary, [R, vocab] float32, on every rank."""
        return self.logits(self.states(batch, cache), batch.logit_adapters)

    def states(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Hidden states of `batch.logit_rows` after the last norm, [R, hidden], on every rank."""
        residual = self._embed(batch.ids)
        with running(self._adapters, tokens=batch.adapters):
            x = self.run_layers(residual, batch, cache)
        x, residual = batch.logit_states(x), batch.logit_states(residual)
        if x.shape[0] == 0:
            return x
        return self._kernels.add_rms_norm(x, residual, self._norm, self._arch.norm_eps)

    def logits(self, states: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Logits [R, vocab] float32 of `states` [R, hidden]."""
        if states.shape[0] == 0:
            return states.new_empty(0, self.info.vocab_size, dtype=torch.float32)
        with running(self._adapters, logits=adapters):
            logits = self._head(states)
        return self._group.all_gather_logits(logits, self.info.vocab_size)

    def first_layers(self, count: int) -> Decoder:
        """See CausalModel."""
        first = copy.copy(self)
        first.geometry = KVGeometry(self.geometry.layers[:count])
        first.run_layers = self._runner_of(self._layers[:count])
        return first

    def with_layers(self, make: MakeLayers) -> Decoder:
        """See CausalModel."""
        other = copy.copy(self)
        other.run_layers = make(self._layers[: len(self.geometry.layers)], self._reduce)
        return other

    def _runner_of(self, layers: Sequence[Layer]) -> Layers:
        return self._kernels.layers(layers, self._reduce)

    @property
    def _reduce(self) -> Reduce | None:
        return self._group.all_reduce if self._group.world_size > 1 else None

    def _embed(self, ids: Tensor) -> Tensor:
        if self._group.world_size == 1:
            return F.embedding(ids, self._embedding)
        share = self._embedding.shape[0]
        local = ids - self._group.rank * share
        elsewhere = (local < 0) | (local >= share)
        x = F.embedding(local.masked_fill(elsewhere, 0), self._embedding)
        return self._group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(1), 0))


class LayerLoader:
    """Reads a rank's weights under the names that the family's checkpoints use."""

    def __init__(
        self,
        arch: Architecture,
        rope: Tensor,
        weights: Weights,
        kernels: Kernels,
        group: ProcessGroup,
        adapters: AdapterTable | None = None,
    ) -> None:
        self._arch = arch
        self._rope = rope
        self._weights = weights
        self._kernels = kernels
        self._group = group
        self._adapters = adapters

    def vocabulary(self, name: str) -> Tensor:
        """The rank's rows of the embedding or the head."""
        return self._weights.vocabulary(name, self._arch.vocab_size, self._arch.hidden_size)

    def head(self, embedding: Tensor) -> Linear:
        """The output head, which is the embedding if the config ties them."""
        weight = embedding if self._arch.tied_head else self.vocabulary("lm_head.weight")
        return self._kernels.head(weight, self._head_site(len(weight)))

    def layer(self, index: int) -> Layer:
        """Load layer `index`."""
        prefix = f"model.layers.{index}"
        attention = self._attention(prefix, self._arch.windows[index])
        self._weights.release()
        mlp = self._mlp(prefix)
        self._weights.release()
        return Layer(attention, mlp)

    def _attention(self, prefix: str, window: int | None) -> AttentionBlock:
        arch, name, world_size = self._arch, f"{prefix}.self_attn", self._group.world_size
        kv = (arch.num_kv_heads, arch.head_dim)
        qkv = [
            Columns(f"{name}.q_proj", arch.num_heads, arch.head_dim),
            Columns(f"{name}.k_proj", *kv),
            Columns(f"{name}.v_proj", *kv),
        ]
        query_norm, key_norm = (
            self.norm(f"{name}.{each}_norm", arch.head_dim) if arch.qk_norm else None
            for each in ("q", "k")
        )
        attended = arch.num_heads * arch.head_dim
        return self._kernels.attention(
            AttentionWeights(
                norm=self.norm(f"{prefix}.input_layernorm", arch.hidden_size),
                eps=arch.norm_eps,
                qkv=self._columns(qkv, bias=arch.qkv_bias),
                query_norm=query_norm,
                key_norm=key_norm,
                out=self._rows(f"{name}.o_proj", attended, bias=arch.out_bias),
                rope=self._rope,
                num_heads=arch.num_heads // world_size,
                num_kv_heads=arch.kv_heads_per_rank(world_size),
                head_dim=arch.head_dim,
                window=window,
            )
        )

    def _mlp(self, prefix: str) -> MlpBlock:
        arch, name = self._arch, f"{prefix}.mlp"
        gate_up = [
            Columns(f"{name}.{each}_proj", arch.intermediate_size) for each in ("gate", "up")
        ]
        return self._kernels.mlp(
            MlpWeights(
                norm=self.norm(f"{prefix}.post_attention_layernorm", arch.hidden_size),
                eps=arch.norm_eps,
                gate_up=self._columns(gate_up, bias=arch.mlp_bias),
                down=self._rows(f"{name}.down_proj", arch.intermediate_size, bias=arch.mlp_bias),
            )
        )

    def norm(self, name: str, size: int) -> Tensor:
        """The scales of a norm, [size]."""
        return self._weights.replicated(f"{name}.weight", size)

    def _columns(self, parts: Sequence[Columns], *, bias: bool) -> LinearWeights:
        def named(kind: str) -> list[Columns]:
            return [Columns(f"{p.name}.{kind}", p.units, p.unit_size) for p in parts]

        return LinearWeights(
            self._weights.columns(named("weight"), self._arch.hidden_size),
            self._weights.biases(named("bias")) if bias else None,
            self._column_site(parts),
        )

    def _rows(self, name: str, inputs: int, *, bias: bool) -> LinearWeights:
        """A row-parallel linear. The results of the ranks are summed, so only rank 0 adds the bias."""
        hidden = self._arch.hidden_size
        adds = bias and self._group.rank == 0
        return LinearWeights(
            self._weights.rows(f"{name}.weight", hidden, inputs),
            self._weights.replicated(f"{name}.bias", hidden) if adds else None,
            self._row_site(name, inputs),
        )

    def _column_site(self, parts: Sequence[Columns]) -> LoraSite | None:
        if self._adapters is None:
            return None
        inputs, found, first = self._arch.hidden_size, list[LoraPart](), 0
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
        hidden, rank = self._arch.hidden_size, self._group.rank
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
        hidden, vocab_size = self._arch.hidden_size, self._arch.vocab_size
        start = min(self._group.rank * share, vocab_size)
        part = LoraPart(
            name="lm_head",
            inputs=hidden,
            outputs=vocab_size,
            input_range=(0, hidden),
            output_range=(start, min(start + share, vocab_size)),
        )
        return self._adapters.add_site([part], is_head=True)
