"""Values that describe a decoder: its layers, norms, rotary embeddings and names of tensors; they compute nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from millrace_shard.kernels.expert_weights import RoutingRule
from millrace_shard.kernels.head_preparation import POSITION_CHANNELS
from millrace_shard.kernels.layer_weights import Activation, ClampedSwiglu
from millrace_shard.models.recurrent_spec import RecurrentSpec
from millrace_shard.models.rope_spec import RopeSpec


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
    bias: bool = False
    """Whether a bias is added before the result is rounded."""


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
    values: bool = False
    """Whether values are normalised too, by a norm without weights."""
    has_weights: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Modules of a layer with experts, relative to the layer.

    The file has a module for each expert, such as `mlp.experts.7.gate_proj`, or tensors that stack all of them.
    """

    router: str = "mlp.gate"
    correction: str | None = None
    """The name of a tensor; None: `e_score_correction_bias` of the router."""
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
    """Whether the last two axes of stacked tensors are swapped."""
    alternating: bool = False
    """Whether gates and ups alternate in stacked tensors."""
    in_a_row: bool = False
    """Whether tensors [E * inter, hidden] are in place of modules: of gates, of ups, and of transposed downs."""
    shared: str = "mlp.shared_expert"
    shared_gate_up: str | None = None
    """Relative to the shared expert: one module with the outputs of gate and up, gates first."""
    shared_down: str = "down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    latent_in: str = "mlp.fc1_latent_proj"
    latent_out: str = "mlp.fc2_latent_proj"

    @property
    def correction_tensor(self) -> str:
        """The correction of the router's choice, relative to the layer."""
        return self.correction or f"{self.router}.e_score_correction_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentNames:
    """Modules of attention over latents, relative to the layer."""

    queries_in: str = "self_attn.q_a_proj"
    queries_norm: str = "self_attn.q_a_layernorm"
    queries_out: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    heads: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Modules of a layer, relative to the layer; None for norms that the family does not have."""

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    qkv: str | None = None
    """One module with the outputs of query, key and value, which the file does not have then."""
    latent: LatentNames = field(default_factory=LatentNames)
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
    embedding_norm: str = "transformer.word_embeddings_layernorm"
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSpec:
    """`down(activation(gate) * up)`, or `down(activation(up))` where the activation needs none."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False
    multipliers: tuple[float, float] = (1.0, 1.0)
    """Of gates before their function, and of the result."""

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
    scales_inputs: bool = False
    """Whether an expert's inputs are multiplied by its share, not its results."""
    latent_size: int | None = None
    """Channels of a latent, made by a linear, that routed experts read and yield; None: they read hidden channels."""

    @property
    def widths(self) -> tuple[int, ...]:
        return self.intermediate_size, *(self.shared.mlp.widths if self.shared else ())


FeedForwardSpec = GatedSpec | ExpertsSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta · log(1 + floor((p + offset) / positions)), as in Llama 4."""

    beta: float
    positions: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """What all heads share in place of keys and values (MLA): a latent of each position, and a key that is rotated.

    A head makes its keys and values of the latent; the rotated key follows its own as further channels.
    """

    dim: int
    """Channels of the latent."""
    rope_dim: int
    """Channels of the key that all heads share."""
    key_dim: int
    """Channels of the keys that a head makes of the latent."""
    value_dim: int
    norm: NormSpec
    """Of the latent, and of the queries' latent."""
    query_dim: int | None = None
    """Channels of the latent that queries are made of; None: they are made of the hidden state."""
    bias: bool = False
    """Whether the linears that make latents have biases."""

    @property
    def head_width(self) -> int:
        """Channels of the queries of a head."""
        return self.key_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention, before it is split over ranks.

    With a latent there is one key-value head: the latent's channels, then those that are rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are queries · keys · scale."""
    rope: RopeSpec | None
    """None: no position enters."""
    window: int | None = None
    """A query at position p sees the keys in (p - window, p]; None: all keys up to p."""
    chunk: int | None = None
    """A query at position p sees the keys from the last multiple of `chunk` on; None: all keys up to p."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap)."""
    clip: float | None = None
    """Queries, keys and values are cut to [-clip, clip] before they are rotated."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and is dropped after it."""
    head_norm: HeadNormSpec | None = None
    query_scaling: QueryScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    gated: bool = False
    """Whether a gate follows each head's query in its projection; the head's result is multiplied by its sigmoid."""
    slopes: tuple[float, ...] = ()
    """Of each head: what a key's position is multiplied by and added to its scores (ALiBi); empty: no position is."""
    by_group: bool = False
    """Whether the fused module has the queries, the key and the value of each key-value head one after the other."""
    values_are_keys: bool = False
    """Whether the projection of keys makes the values too."""
    kv_source: int | None = None
    """The earlier layer whose keys and values are read; None: the layer has its own."""
    latent: LatentSpec | None = None

    @property
    def latent_dim(self) -> int | None:
        """Channels of the latent; None without one."""
        return None if self.latent is None else self.latent.dim

    @property
    def cached_dim(self) -> int:
        """Channels of the keys of a head in the KV cache."""
        return self.head_dim + (POSITION_CHANNELS if self.slopes else 0)

    @property
    def out_width(self) -> int:
        """Inputs of the output projection."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)


class Halves(Enum):
    """The halves that a layer has."""

    BOTH = "both"
    FIRST = "first"
    """Attention, or what is in its place."""
    SECOND = "second"
    """Feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSpec:
    """Factors of attention and of a recurrent layer, which both read one norm; their results are added."""

    attention_input: float = 1.0
    attention_result: float = 1.0
    recurrent_input: float = 1.0
    recurrent_result: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. The parts that it does not compute are as in the model's other layers."""

    attention: AttentionSpec
    recurrent: RecurrentSpec | None = None
    """In place of attention, or in addition to it."""
    beside: BesideSpec | None = None
    """None: a recurrent layer lacks attention."""
    halves: Halves = Halves.BOTH
    feed_forward: FeedForwardSpec
    norm: NormSpec
    norm_places: NormPlaces = NormPlaces.BEFORE
    residual_multiplier: float = 1.0
    """Results of attention and feed-forward are multiplied by it before they are added."""
    side_experts: ExpertsSpec | None = None
    """Experts that read the same state as a dense feed-forward half, and are added to its result, as in Gemma 4."""
    scaled: bool = False
    """Whether a learned number multiplies the state after the layer."""

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.halves is not Halves.SECOND and (
            self.recurrent is None or self.beside is not None
        )

    @property
    def has_feed_forward(self) -> bool:
        return self.halves is not Halves.FIRST

    @property
    def mixture(self) -> ExpertsSpec | None:
        """The experts of the layer, if it has any."""
        return (
            self.feed_forward if isinstance(self.feed_forward, ExpertsSpec) else self.side_experts
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Intermediate channels of the feed-forward half, and of the experts next to it."""
        return *self.feed_forward.widths, *(self.side_experts.widths if self.side_experts else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsSpec:
    """A further input of every layer, made of the token and of its embedding, as in Gemma 4."""

    dim: int
    """Channels of each layer's input."""
    vocab_size: int
    activation: Activation


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
    head_bias: bool = False
    head_normalised: bool = False
    """Whether each row of the head is divided by its length."""
    may_lack_head: bool = False
    """Whether the file may lack a head, because only hidden states are requested."""
    embedding_norm: NormSpec | None = None
    """Of the embeddings, before the first layer."""
    embedding_multiplier: float = 1.0
    """Rounded to the model's dtype before it is used."""
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    """Logits become softcap · tanh(logit / softcap)."""
    layer_inputs: LayerInputsSpec | None = None
    names: WeightNames = field(default_factory=WeightNames)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer reads."""
        sources = (layer.attention.kv_source for layer in self.layers)
        return tuple(index if source is None else source for index, source in enumerate(sources))

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that have attention."""
        return tuple(layer.attention for layer in self.layers if layer.attends)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer keeps a state in place of keys and values."""
        return any(layer.recurrent is not None for layer in self.layers)

    @property
    def reads_hosts(self) -> bool:
        """Whether a step needs work on the host, or more inputs than tokens and positions."""
        return self.layer_inputs is not None or any(each.chunk for each in self.attentions)

    @property
    def has_latents(self) -> bool:
        """Whether layers attend over latents."""
        return any(layer.attention.latent for layer in self.layers)

    @property
    def has_slopes(self) -> bool:
        """Whether scores depend on positions by slopes (ALiBi)."""
        return any(each.slopes for each in self.attentions)

    @property
    def num_stored_layers(self) -> int:
        return len(self.layers) + self.num_more_layers
