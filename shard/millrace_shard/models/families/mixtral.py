"""Mixtral: Mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.expert_fields import (
    OF_TRAINING,
    mixture_decoder,
    softmax_rule,
)
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    LayerNames,
    RouterSpec,
    WeightNames,
)

PUBLISHED = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
)
NAMES = WeightNames(layer=LayerNames(experts=(PUBLISHED, ExpertNames())))


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = replace(llama_attention(config), window=config.optional_count("sliding_window"))
    num_layers, count = config.count("num_hidden_layers"), config.count("num_local_experts")
    rule = softmax_rule(config, count, renormalise=True)
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule),
        intermediate_size=config.count("intermediate_size"),
        activation=activation(config),
    )
    spec = mixture_decoder(config, [attention] * num_layers, experts, [True] * num_layers)
    return replace(spec, names=NAMES)


FAMILY = Family(
    model_type="mixtral",
    classes=("MixtralForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    aliases={"num_experts": "num_local_experts"},
    without_effect=(*OF_TRAINING, "router_jitter_noise"),
)
