"""OLMoE: Llama with experts, and norms over the whole width of queries and keys."""

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
from millrace_shard.models.spec import DecoderSpec, ExpertsSpec, HeadNormSpec, NormSpec, RouterSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    config.check("clip_qkv", ())
    norm = NormSpec(eps=config.number("rms_norm_eps"))
    attention = replace(
        llama_attention(config, bias=config.flag("attention_bias")),
        head_norm=HeadNormSpec(norm=norm, whole_width=True),
    )
    num_layers, count = config.count("num_hidden_layers"), config.count("num_experts")
    rule = softmax_rule(config, count, renormalise=config.flag("norm_topk_prob"))
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule),
        intermediate_size=config.count("intermediate_size"),
        activation=activation(config),
    )
    return mixture_decoder(config, [attention] * num_layers, experts, [True] * num_layers)


FAMILY = Family(
    model_type="olmoe",
    classes=("OlmoeForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50_279,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    aliases={"num_local_experts": "num_experts"},
    without_effect=OF_TRAINING,
)
