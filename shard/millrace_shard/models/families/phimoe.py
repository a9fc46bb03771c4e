"""Phi-3.5-MoE: Mixtral with LayerNorms, biases, and experts chosen by sparsemixer."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader, is_number, rope_parameters
from millrace_shard.models.families.expert_fields import (
    OF_TRAINING,
    experts_per_token,
    mixture_decoder,
)
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.families.mixtral import PUBLISHED
from millrace_shard.models.rope_spec import LongRopeScaling
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    LayerNames,
    NormSpec,
    RouterSpec,
    WeightNames,
)

NAMES = WeightNames(layer=LayerNames(experts=(PUBLISHED, ExpertNames(router="mlp.router"))))


def _spec(config: ConfigReader) -> DecoderSpec:
    num_layers, count = config.count("num_hidden_layers"), config.count("num_local_experts")
    if experts_per_token(config, count) != 2:
        raise UnsupportedModel("num_experts_per_tok of phimoe must be 2")
    jitter = config.number("router_jitter_noise")
    rule = RoutingRule(top_k=2, scoring=Scoring.SPARSEMIXER, jitter=jitter)
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule),
        intermediate_size=config.count("intermediate_size"),
        activation=activation(config),
    )
    layers = [_attention(config)] * num_layers
    spec = mixture_decoder(config, layers, experts, [True] * num_layers)
    norm = NormSpec(eps=spec.norm.eps, centred=True, wide=True, bias=True)
    return replace(
        spec,
        layers=tuple(replace(layer, norm=norm) for layer in spec.layers),
        norm=norm,
        head_bias=config.flag("lm_head_bias"),
        names=NAMES,
    )


def _attention(config: ConfigReader) -> AttentionSpec:
    factors = ("short_mscale", "long_mscale")
    bias, own = config.flag("attention_bias"), frozenset(factors)
    attention = llama_attention(config, bias=bias, rope_extra=own)
    attention = replace(attention, window=config.optional_count("sliding_window"))
    if attention.rope is None or attention.rope.scaling is None:
        return attention
    fields = rope_parameters(config)
    short, long = (fields.get(name) for name in factors)
    scaling = attention.rope.scaling
    if not isinstance(scaling, LongRopeScaling) or not is_number(short) or short != long:
        raise UnsupportedModel(
            f"rope_parameters={fields!r} are not supported for phimoe: "
            "longrope with one value for short_mscale and long_mscale is"
        )
    scaling = replace(scaling, attention_factor=float(short))
    return replace(attention, rope=replace(attention.rope, scaling=scaling))


FAMILY = Family(
    model_type="phimoe",
    classes=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    spec=_spec,
    defaults={
        "vocab_size": 32_064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
        "num_local_experts": 16,
        "router_jitter_noise": 0.01,
        "eos_token_id": 2,
    },
    aliases={"num_experts": "num_local_experts"},
    without_effect=(*OF_TRAINING, "input_jitter_noise"),
)
