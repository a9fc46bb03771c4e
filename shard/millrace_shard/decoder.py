"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, one decoder over any kernels and any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.architecture import Architecture
from millrace_shard.kernels.base import Kernels, LayerCache, Linear
from millrace_shard.model import KVGeometry, ModelInfo
from millrace_shard.parallel import ProcessGroup
from millrace_shard.ragged import RaggedBatch
from millrace_shard.weights import Columns, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One rank's part of a layer."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


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
    ) -> None:
        """Load this rank's weights; `rope` is the table of `rope_table` on the model's device."""
        self.info = info
        self._arch = arch
        self._kernels = kernels
        self._group = group
        self._rope = rope
        self._num_heads = arch.num_heads // group.world_size
        self._num_kv_heads = arch.kv_heads_per_rank(group.world_size)
        self.geometry = KVGeometry(((self._num_kv_heads, arch.head_dim),) * arch.num_layers)

        loader = LayerLoader(arch, weights, kernels, group)
        self._embedding = loader.vocabulary("model.embed_tokens.weight")
        self._layers = [loader.layer(i) for i in range(arch.num_layers)]
        self._norm = loader.norm("model.norm", arch.hidden_size)
        self._head = loader.head(self._embedding)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Logits of `batch.logit_rows` over the whole vocabulary, [R, vocab] float32, on every rank."""
        kernels, eps = self._kernels, self._arch.norm_eps
        residual = self._embed(batch.ids)
        x = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for layer, layer_cache, next_norm in zip(self._layers, cache, next_norms, strict=True):
            x = self._attention(layer, x, batch, layer_cache)
            x = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._mlp(layer, x)
            x = kernels.add_rms_norm(x, residual, next_norm, eps)
        return self._logits(x[batch.logit_rows])

    def _embed(self, ids: Tensor) -> Tensor:
        if self._group.world_size == 1:
            return F.embedding(ids, self._embedding)
        share = self._embedding.shape[0]
        local = ids - self._group.rank * share
        elsewhere = (local < 0) | (local >= share)
        x = F.embedding(local.masked_fill(elsewhere, 0), self._embedding)
        return self._group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _attention(self, layer: Layer, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        qkv = layer.qkv(x)
        if layer.query_norm is not None and layer.key_norm is not None:
            heads = qkv.view(qkv.shape[0], -1, self._arch.head_dim)
            queries = heads[:, : self._num_heads]
            keys = heads[:, self._num_heads : self._num_heads + self._num_kv_heads]
            queries.copy_(self._kernels.rms_norm(queries, layer.query_norm, self._arch.norm_eps))
            keys.copy_(self._kernels.rms_norm(keys, layer.key_norm, self._arch.norm_eps))
        rotated = self._kernels.rope_store(
            qkv,
            self._rope,
            batch,
            cache,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
        )
        attended = self._kernels.attend(
            rotated, batch, cache, scale=self._arch.head_dim**-0.5, window=layer.window
        )
        return self._group.all_reduce(layer.out(attended))

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        return self._group.all_reduce(layer.down(self._kernels.silu_mul(layer.gate_up(x))))

    def _logits(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, self.info.vocab_size, dtype=torch.float32)
        logits = self._group.all_gather(self._head(x))
        return logits[:, : self.info.vocab_size].float()


class LayerLoader:
    """Reads a rank's weights under the names that the family's checkpoints use."""

    def __init__(
        self, arch: Architecture, weights: Weights, kernels: Kernels, group: ProcessGroup
    ) -> None:
        self._arch = arch
        self._weights = weights
        self._kernels = kernels
        self._group = group

    def vocabulary(self, name: str) -> Tensor:
        """The rank's rows of the embedding or the head."""
        return self._weights.vocabulary(name, self._arch.vocab_size, self._arch.hidden_size)

    def head(self, embedding: Tensor) -> Linear:
        """The output head, which is the embedding where the config ties them."""
        tied = self._arch.tied_head
        return self._kernels.linear(embedding if tied else self.vocabulary("lm_head.weight"))

    def layer(self, index: int) -> Layer:
        """All of layer `index`."""
        arch, prefix = self._arch, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        kv = (arch.num_kv_heads, arch.head_dim)
        qkv = [
            Columns(f"{attention}.q_proj", arch.num_heads, arch.head_dim),
            Columns(f"{attention}.k_proj", *kv),
            Columns(f"{attention}.v_proj", *kv),
        ]
        gate_up = [Columns(f"{mlp}.{name}_proj", arch.intermediate_size) for name in ("gate", "up")]
        attended = arch.num_heads * arch.head_dim
        norm_name = f"{attention}.q_norm", f"{attention}.k_norm"
        query_norm, key_norm = (
            self.norm(name, arch.head_dim) if arch.qk_norm else None for name in norm_name
        )
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm", arch.hidden_size),
            qkv=self._columns(qkv, bias=arch.qkv_bias),
            query_norm=query_norm,
            key_norm=key_norm,
            out=self._rows(f"{attention}.o_proj", attended, bias=arch.out_bias),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm", arch.hidden_size),
            gate_up=self._columns(gate_up, bias=arch.mlp_bias),
            down=self._rows(f"{mlp}.down_proj", arch.intermediate_size, bias=arch.mlp_bias),
            window=arch.windows[index],
        )

    def norm(self, name: str, size: int) -> Tensor:
        """A norm's scales."""
        return self._weights.replicated(f"{name}.weight", size)

    def _columns(self, parts: Sequence[Columns], *, bias: bool) -> Linear:
        def tensor(kind: str, *inputs: int) -> Tensor:
            named = [Columns(f"{p.name}.{kind}", p.units, p.unit_size) for p in parts]
            return self._weights.columns(named, *inputs)

        weight = tensor("weight", self._arch.hidden_size)
        return self._kernels.linear(weight, tensor("bias") if bias else None)

    def _rows(self, name: str, inputs: int, *, bias: bool) -> Linear:
        """The ranks' results are summed, so only rank 0 adds the bias."""
        weight = self._weights.rows(f"{name}.weight", self._arch.hidden_size, inputs)
        adds = bias and self._group.rank == 0
        return self._kernels.linear(
            weight,
            self._weights.replicated(f"{name}.bias", self._arch.hidden_size) if adds else None,
        )
