"""gpt-oss: experts with biases and clamped gates, windows on every other layer, and attention sinks."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.kernels.layer_weights import ClampedSwiglu
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.expert_fields import (
    OF_TRAINING,
    experts_per_token,
    mixture_decoder,
)
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation, window_kinds
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    LayerNames,
    RouterSpec,
    WeightNames,
)

EXPERTS = ExpertNames(router="mlp.router", transposed=True, alternating=True)
NAMES = WeightNames(layer=LayerNames(experts=(EXPERTS,)))


def _spec(config: ConfigReader) -> DecoderSpec:
    bias = config.flag("attention_bias")
    attention = replace(llama_attention(config), qkv_bias=bias, out_bias=bias, sinks=True)
    kinds, window = window_kinds(config, 2), config.value("sliding_window")
    if "sliding_attention" in kinds:
        window = config.count("sliding_window")
    layers = [
        replace(attention, window=window if kind == "sliding_attention" else None) for kind in kinds
    ]
    count = config.count("num_local_experts")
    rule = RoutingRule(top_k=experts_per_token(config, count), scoring=Scoring.SOFTMAX_OF_CHOSEN)
    # The class reads the field, but its experts have their own function.
    activation(config)
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule, bias=True),
        intermediate_size=config.count("intermediate_size"),
        activation=ClampedSwiglu(
            alpha=config.number("swiglu_alpha"), limit=config.number("swiglu_limit")
        ),
        bias=True,
    )
    spec = mixture_decoder(config, layers, experts, [True] * len(kinds))
    norm = replace(spec.norm, wide=True)
    return replace(
        spec,
        layers=tuple(replace(layer, norm=norm) for layer in spec.layers),
        norm=norm,
        names=NAMES,
    )


FAMILY = Family(
    model_type="gpt_oss",
    classes=("GptOssForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    aliases={"num_experts": "num_local_experts"},
    without_effect=OF_TRAINING,
)
