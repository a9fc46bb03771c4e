"""The architecture of a checkpoint of the Llama family, read from its config, which is checked for unknown features."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.models.plain_config import PlainConfig
from millrace_shard.models.rope import rope_kind

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILY = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_HONOURED = frozenset(
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
    )
)
_WITHOUT_EFFECT = frozenset(
    (
        "attention_dropout",
        "initializer_range",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    )
)
# Fields that other code bases write, with the values that have no effect.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (1, None),
    "attention_multiplier": (None,),
    "residual_multiplier": (1, None),
    "embedding_multiplier": (1, None),
    "logits_scaling": (1, None),
    "no_rope_layers": (None, []),
    "attention_chunk_size": (None,),
    "dual_chunk_attention_config": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of the Llama family, before it is split over ranks."""

    model_type: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Attention window of each layer."""
    tied_head: bool

    @classmethod
    def from_config(cls, config: PlainConfig | PretrainedConfig) -> Architecture:
        """Read `config`. Raises UnsupportedModel, naming the field, for values that the decoder does not support."""
        kind = config.model_type
        if kind not in FAMILY:
            raise UnsupportedModel(f"model_type {kind!r} is not of the family: {', '.join(FAMILY)}")
        _refuse_unknown(config)
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            model_type=kind,
            hidden_size=_count(config, "hidden_size"),
            num_heads=_count(config, "num_attention_heads"),
            num_kv_heads=_kv_heads(config),
            head_dim=_head_dim(config),
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=_count(config, "num_hidden_layers"),
            vocab_size=_count(config, "vocab_size"),
            norm_eps=float(config.rms_norm_eps),
            qkv_bias=kind == "qwen2" or (kind in {"llama", "qwen3"} and bias),
            out_bias=kind in {"llama", "qwen3"} and bias,
            mlp_bias=kind == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
            windows=_windows(config),
            tied_head=bool(config.tie_word_embeddings),
        )

    @property
    def window(self) -> int | None:
        """The attention window of all layers, if they have the same one."""
        return self.windows[0] if len(set(self.windows)) == 1 else None

    def kv_heads_per_rank(self, world_size: int) -> int:
        """Key-value heads per rank; with fewer heads than ranks, neighbouring ranks hold the same head."""
        return max(1, self.num_kv_heads // world_size)

    def layer_shape(self, world_size: int) -> LayerShape:
        """The shape of a rank's part of the layers. Raises as `check_split`."""
        self.check_split(world_size)
        num_heads, num_kv_heads = self.num_heads // world_size, self.kv_heads_per_rank(world_size)
        inter = self.intermediate_size // world_size
        return LayerShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            kinds=tuple((window, None) for window in dict.fromkeys(self.windows)),
            linears=(
                ((num_heads + 2 * num_kv_heads) * self.head_dim, self.hidden_size),
                (self.hidden_size, num_heads * self.head_dim),
                (2 * inter, self.hidden_size),
                (self.hidden_size, inter),
            ),
            head=(-(-self.vocab_size // world_size), self.hidden_size),
        )

    def check_split(self, world_size: int) -> None:
        """Raise UnsupportedModel, naming the possible numbers of ranks, unless `world_size` is one of them."""
        possible = [n for n in range(1, self.num_heads + 1) if self._splits(n)]
        if world_size not in possible:
            raise UnsupportedModel(
                f"{world_size} shards cannot share {self.num_heads} attention heads, {self.num_kv_heads} key-value "
                f"heads and {self.intermediate_size} intermediate channels; these numbers of shards work: "
                f"{', '.join(map(str, possible))}"
            )

    def _splits(self, ranks: int) -> bool:
        divides = self.num_heads % ranks == 0 and self.intermediate_size % ranks == 0
        return divides and (self.num_kv_heads % ranks == 0 or ranks % self.num_kv_heads == 0)


def _refuse_unknown(config: PlainConfig | PretrainedConfig) -> None:
    """Raise UnsupportedModel for values that would change the computation in ways the decoder does not support."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            raise UnsupportedModel(f"{name}={value!r} is not supported for {config.model_type}")
    classes = getattr(config, "architectures", None)
    if classes and classes != [FAMILY[config.model_type]]:
        raise UnsupportedModel(
            f"architectures={classes!r} is not supported, only {FAMILY[config.model_type]}"
        )
    if not isinstance(config, PlainConfig):
        _refuse_unknown_fields(config)
    rope_kind(config)


def _refuse_unknown_fields(config: PretrainedConfig) -> None:
    from transformers import PretrainedConfig  # noqa: PLC0415

    general = {field.name for field in dataclasses.fields(PretrainedConfig)}
    known = _HONOURED | _WITHOUT_EFFECT | _NEUTRAL.keys() | general
    for field in dataclasses.fields(type(config)):
        if field.name not in known and getattr(config, field.name) != _default(field):
            value = getattr(config, field.name)
            raise UnsupportedModel(
                f"{field.name}={value!r} is not supported for {config.model_type}"
            )


def _default(field: dataclasses.Field[Any]) -> object:
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def _count(config: PlainConfig | PretrainedConfig, field: str) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{field}={value!r} must be a positive whole number")
    return value


def _kv_heads(config: PlainConfig | PretrainedConfig) -> int:
    heads, kv_heads = config.num_attention_heads, _count(config, "num_key_value_heads")
    if heads % kv_heads:
        raise UnsupportedModel(
            f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        )
    return kv_heads


def _head_dim(config: PlainConfig | PretrainedConfig) -> int:
    if getattr(config, "head_dim", None) is not None:
        return _count(config, "head_dim")
    return _count(config, "hidden_size") // _count(config, "num_attention_heads")


def _windows(config: PlainConfig | PretrainedConfig) -> tuple[int | None, ...]:
    """The window of each layer: Mistral has one for all layers, Qwen for those in `layer_types`, Llama has none."""
    num_layers = _count(config, "num_hidden_layers")
    if isinstance(config, PlainConfig):
        return (config.window,) * num_layers
    if config.model_type == "llama":
        return (None,) * num_layers
    window = config.sliding_window
    if window is not None:
        window = _count(config, "sliding_window")
    if config.model_type == "mistral":
        return (window,) * num_layers
    kinds = tuple(config.layer_types)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModel(
            f"layer_types={kinds!r} must name one of two kinds for each of {num_layers} layers"
        )
    if "sliding_attention" in kinds and window is None:
        raise UnsupportedModel("layer_types asks for sliding_attention, but sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
