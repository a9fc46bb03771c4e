"""Qwen 3 MoE: Qwen 3 with experts."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.expert_fields import (
    OF_TRAINING,
    mixture_decoder,
    qwen_is_sparse,
    softmax_rule,
)
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.spec import DecoderSpec, ExpertsSpec, HeadNormSpec, NormSpec, RouterSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    bias, is_used = config.flag("attention_bias"), config.flag("use_sliding_window")
    window = config.value("sliding_window")
    attention = replace(
        llama_attention(config),
        qkv_bias=bias,
        out_bias=bias,
        head_norm=HeadNormSpec(norm=NormSpec(eps=config.number("rms_norm_eps"))),
        window=config.count("sliding_window") if is_used and window is not None else None,
    )
    count = config.count("num_experts")
    experts = ExpertsSpec(
        router=RouterSpec(
            num_experts=count,
            rule=softmax_rule(config, count, renormalise=config.flag("norm_topk_prob")),
        ),
        intermediate_size=config.count("moe_intermediate_size"),
        activation=activation(config),
    )
    layers = [attention] * config.count("num_hidden_layers")
    return mixture_decoder(config, layers, experts, qwen_is_sparse(config))


FAMILY = Family(
    model_type="qwen3_moe",
    classes=("Qwen3MoeForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    aliases={"num_local_experts": "num_experts"},
    without_effect=OF_TRAINING,
)
