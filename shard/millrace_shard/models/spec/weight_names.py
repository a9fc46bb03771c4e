"""The names of the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Modules of a layer with experts, relative to the layer.

    The file has a module for each expert, such as `mlp.experts.7.gate_proj`, or tensors that stack all of them.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    """Relative to an expert."""
    up: str = "up_proj"
    down: str = "down_proj"
    stacked_gate_up: str = "gate_up_proj"
    """The name of a tensor, relative to the experts: [E, 2 * inter, hidden], gates first."""
    stacked_down: str = "down_proj"
    """The name of a tensor: [E, hidden, inter]."""
    transposed: bool = False
    """Whether the last two axes of stacked tensors are swapped, and gates and ups alternate."""
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Modules of a layer, relative to the layer; None for norms that the family does not have."""

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    qkv: str | None = None
    """One module whose outputs are those of query, key and value, which the file does not have then."""
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    """The name of a tensor."""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    """One module whose outputs are those of gate and up, gates first."""
    down: str = "mlp.down_proj"
    experts: tuple[ExpertNames, ...] = (ExpertNames(),)
    """Where the file has no router by the first names, the next ones hold."""
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Modules of a decoder."""

    layer: LayerNames = field(default_factory=LayerNames)
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
