"""Values that describe a decoder: its layers, norms, rotary embeddings and names of tensors; they compute nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from millrace_shard.kernels.expert_weights import RoutingRule
from millrace_shard.kernels.layer_weights import Activation, ClampedSwiglu


class NormPlaces(Enum):
    """The positions of a layer's norms."""

    BEFORE = "before"
    """Before attention and feed-forward, as in Llama."""
    AFTER = "after"
    """After attention and feed-forward, before their results are added, as in OLMo 2."""
    AROUND = "around"
    """Before and after both, as in Gemma 2."""
    PARALLEL = "parallel"
    """Once, before attention and feed-forward, which both read its result, as in Cohere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm over the last axis, computed in float32."""

    eps: float
    centred: bool = False
    """Whether the mean is subtracted first (LayerNorm); otherwise RMSNorm."""
    plus_one: bool = False
    """Whether 1 is added to the weight."""
    wide: bool = False
    """Whether the weight is multiplied in float32, before the result is rounded; otherwise after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormSpec:
    """The norms of queries and keys."""

    norm: NormSpec
    whole_width: bool = False
    """Whether one norm covers all heads; otherwise each head has its own statistics."""
    weight_per_head: bool = False
    """Whether each head has its own weights."""
    after_rope: bool = False
    """Whether heads are rotated first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """The base grows with the length of the sequence past the trained length (dynamic NTK)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Long waves are stretched by `factor`, short ones kept, and those in between interpolated (arXiv 2309.00071)."""

    factor: float
    original_positions: int
    attention_factor: float
    """Scales cosines and sines."""
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True
    """Whether the bounds of the interpolated channels are rounded to whole channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """One factor per frequency: short ones within `original_positions`, long ones past them (arXiv 2402.13753)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float
    """Scales cosines and sines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long waves are stretched, short ones kept, and those in between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | Llama3Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The rotation of the first `rotary_dim` channels of a head; the others are not rotated."""

    rotary_dim: int
    theta: float
    """The base of the frequencies."""
    max_positions: int
    """The trained length, `max_position_embeddings`."""
    scaling: RopeScaling | None = None
    interleaved: bool = False
    """Whether channel 2 i is paired with 2 i + 1; otherwise channel i is paired with i + rotary_dim / 2."""


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
    """One module with the outputs of query, key and value, which the file does not have then."""
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    """The name of a tensor."""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    """One module with the outputs of gate and up, gates first."""
    down: str = "mlp.down_proj"
    experts: tuple[ExpertNames, ...] = (ExpertNames(),)
    """Alternatives: the first names whose router is in the file hold."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSpec:
    """`down(activation(gate) * up)`."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.intermediate_size,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The linear that scores experts, and the rule that chooses by the scores."""

    num_experts: int
    rule: RoutingRule
    bias: bool = False
    correction: bool = False
    """Whether experts are chosen by their scores plus a learned correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSpec:
    """An expert that all tokens have."""

    mlp: GatedSpec
    gated: bool = False
    """Whether its result is multiplied by the sigmoid of a linear with one output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The sum of the chosen experts, times their shares, and of a shared expert, if there is one."""

    router: RouterSpec
    intermediate_size: int
    """Of each expert."""
    activation: Activation | ClampedSwiglu = Activation.SILU
    bias: bool = False
    shared: SharedExpertSpec | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        return self.intermediate_size, *(self.shared.mlp.widths if self.shared else ())


FeedForwardSpec = GatedSpec | ExpertsSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta · log(1 + floor(p / positions)), as in Llama 4."""

    beta: float
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention, before it is split over ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are queries · keys · scale."""
    rope: RopeSpec | None
    """None: no position enters."""
    window: int | None = None
    """A query at position p sees the keys in (p - window, p]; None: all keys up to p."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap)."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and is dropped after it."""
    head_norm: HeadNormSpec | None = None
    query_scaling: QueryScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    norm_places: NormPlaces = NormPlaces.BEFORE
    residual_multiplier: float = 1.0
    """Results of attention and feed-forward are multiplied by it before they are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder before it is split over ranks."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    """Before the head."""
    num_more_layers: int = 0
    """Layers of the file after `layers`: they predict further tokens and are not computed."""
    max_positions: int
    """`max_position_embeddings`."""
    tied_head: bool = False
    """Whether the head is the embedding."""
    may_lack_head: bool = False
    """Whether the file may lack a head, because only hidden states are requested."""
    embedding_multiplier: float = 1.0
    """Rounded to the model's dtype before it is used."""
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    """Logits become softcap · tanh(logit / softcap)."""
    names: WeightNames = field(default_factory=WeightNames)

    @property
    def num_stored_layers(self) -> int:
        return len(self.layers) + self.num_more_layers
