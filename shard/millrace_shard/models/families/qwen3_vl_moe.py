"""The text part of Qwen 3 VL with experts."""

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
from millrace_shard.models.families.qwen3_vl import qwen3_vl_attention
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    LayerNames,
    RouterSpec,
    WeightNames,
)

NAMES = WeightNames(layer=LayerNames(experts=(ExpertNames(transposed=True),)))


def _spec(config: ConfigReader) -> DecoderSpec:
    count = config.count("num_experts")
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=softmax_rule(config, count, renormalise=True)),
        intermediate_size=config.count("moe_intermediate_size"),
        activation=activation(config),
    )
    layers = [qwen3_vl_attention(config)] * config.count("num_hidden_layers")
    spec = mixture_decoder(config, layers, experts, qwen_is_sparse(config))
    return replace(spec, names=NAMES)


FAMILY = Family(
    model_type="qwen3_vl_moe_text",
    classes=("Qwen3VLMoeForConditionalGeneration",),
    spec=_spec,
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 16,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": True,
    },
    aliases={"num_local_experts": "num_experts"},
    without_effect=OF_TRAINING,
)
