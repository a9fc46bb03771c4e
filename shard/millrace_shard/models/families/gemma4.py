"""Gemma 4, the text part: larger heads on full layers, layers that share keys and values, and inputs of each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader, is_number, read_rope, rope_parameters
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation, window_kinds
from millrace_shard.models.families.gemma2 import NAMES as OF_GEMMA2
from millrace_shard.models.rope_spec import ProportionalScaling, RopeSpec
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    GatedSpec,
    HeadNormSpec,
    LayerInputsSpec,
    LayerSpec,
    NormPlaces,
    NormSpec,
    RouterSpec,
)

EXPERTS = ExpertNames(router="router.proj", experts="experts")
NAMES = replace(OF_GEMMA2, layer=replace(OF_GEMMA2.layer, experts=(EXPERTS,)))
FULL, SLIDING = "full_attention", "sliding_attention"


def _spec(config: ConfigReader) -> DecoderSpec:
    config.check("use_bidirectional_attention", (False, "vision"))
    norm = NormSpec(eps=config.number("rms_norm_eps"), wide=True)
    # The class makes the last layer a full one.
    kinds = (*window_kinds(config, 6)[:-1], FULL)
    sources = _sources(config, kinds)
    gate, width = activation(config, "hidden_activation"), config.count("intermediate_size")
    doubled = 2 * width if config.flag("use_double_wide_mlp") else width
    hidden_size, vocab_size = config.count("hidden_size"), config.count("vocab_size")
    experts = _experts(config)
    layers = (
        LayerSpec(
            attention=_attention(config, index, kind, norm, source),
            feed_forward=GatedSpec(
                intermediate_size=width if source is None else doubled, activation=gate
            ),
            norm=norm,
            norm_places=NormPlaces.AROUND,
            side_experts=experts,
            scaled=True,
        )
        for index, (kind, source) in enumerate(zip(kinds, sources, strict=True))
    )
    return DecoderSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=tuple(layers),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        embedding_multiplier=hidden_size**0.5,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        layer_inputs=_layer_inputs(config, vocab_size),
        names=NAMES,
    )


def _sources(config: ConfigReader, kinds: tuple[str, ...]) -> list[int | None]:
    """For each layer the last one of its kind with own keys and values, if it has none itself."""
    shared = config.whole("num_kv_shared_layers")
    own = kinds[: max(0, len(kinds) - shared)]
    if shared and set(own) != set(kinds):
        raise UnsupportedModel(f"num_kv_shared_layers={shared} leaves no layer of some kind")
    last = {kind: index for index, kind in enumerate(own)}
    return [None if index < len(own) else last[kind] for index, kind in enumerate(kinds)]


def _attention(
    config: ConfigReader, index: int, kind: str, norm: NormSpec, source: int | None
) -> AttentionSpec:
    heads, is_full = config.count("num_attention_heads"), kind == FULL
    has_own_values = not (config.flag("attention_k_eq_v") and is_full)
    head_dim, kv_heads = config.count("head_dim"), config.count("num_key_value_heads")
    if is_full:
        head_dim, kv_heads = _of_full_layer(config, index, kv_heads, has_own_values=has_own_values)
    if heads % kv_heads:
        raise UnsupportedModel(f"{kv_heads} key-value heads do not divide {heads} attention heads")
    bias = config.flag("attention_bias")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=1.0,
        rope=_rope(config, kind, head_dim),
        window=None if is_full else config.count("sliding_window"),
        head_norm=HeadNormSpec(norm=norm, values=True),
        qkv_bias=bias,
        out_bias=bias,
        values_are_keys=not has_own_values,
        kv_source=source,
    )


def _of_full_layer(
    config: ConfigReader, index: int, kv_heads: int, *, has_own_values: bool
) -> tuple[int, int]:
    """Channels of a head and key-value heads, by `per_layer_config`, or by fields for all full layers."""
    by_layer = config.value("per_layer_config")
    if by_layer is None:
        own = None if has_own_values else config.optional_count("num_global_key_value_heads")
        return config.count("global_head_dim"), own or kv_heads
    fields = by_layer.get(str(index)) if isinstance(by_layer, dict) else None
    if not isinstance(fields, dict) or fields.keys() - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(f"per_layer_config={by_layer!r} is not supported for gemma4_text")
    own_reader = ConfigReader(fields, {"head_dim": 512, "num_key_value_heads": kv_heads})
    return own_reader.count("head_dim"), own_reader.count("num_key_value_heads")


def _rope(config: ConfigReader, kind: str, head_dim: int) -> RopeSpec:
    fields: dict[str, Any] = rope_parameters(config, kind)
    if fields.get("rope_type") != "proportional":
        return read_rope(config, head_dim=head_dim, layer_kind=kind)
    theta, share = fields.get("rope_theta"), fields.get("partial_rotary_factor", 1.0)
    known = {"rope_type", "rope_theta", "partial_rotary_factor"}
    if not is_number(theta) or theta <= 1 or not is_number(share) or not 0 <= share <= 1:
        raise UnsupportedModel(f"rope_parameters={fields!r} are not supported")
    if any(value is not None for name, value in fields.items() if name not in known):
        raise UnsupportedModel(f"rope_parameters={fields!r} are not supported: {sorted(known)} are")
    return RopeSpec(
        rotary_dim=head_dim,
        theta=float(theta),
        max_positions=config.count("max_position_embeddings"),
        scaling=ProportionalScaling(angles=int(share * head_dim // 2)),
    )


def _layer_inputs(config: ConfigReader, vocab_size: int) -> LayerInputsSpec | None:
    dim, own_size = (
        config.whole("hidden_size_per_layer_input"),
        config.count("vocab_size_per_layer_input"),
    )
    if not dim:
        return None
    if own_size < vocab_size:
        raise UnsupportedModel(
            f"vocab_size_per_layer_input={own_size} is less than vocab_size={vocab_size}"
        )
    gate = activation(config, "hidden_activation")
    return LayerInputsSpec(dim=dim, vocab_size=own_size, activation=gate)


def _experts(config: ConfigReader) -> ExpertsSpec | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    count, top_k, width = (config.optional_count(name) for name in names)
    if not config.flag("enable_moe_block"):
        return None
    if not (count and top_k and width):
        raise UnsupportedModel(f"enable_moe_block without one of {', '.join(names)}")
    if top_k > count:
        raise UnsupportedModel(f"top_k_experts={top_k} of {count} experts")
    rule = RoutingRule(top_k=top_k, scoring=Scoring.SOFTMAX, renormalise=True)
    return ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule),
        intermediate_size=width,
        activation=activation(config, "hidden_activation"),
    )


FAMILY = Family(
    model_type="gemma4_text",
    classes=("Gemma4ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    },
)
