"""Qwen 3.5 and 3.6 with experts, their text part too."""

from __future__ import annotations

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.expert_fields import OF_TRAINING
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.qwen3_next import OF_CLASS, hybrid_decoder, qwen_experts
from millrace_shard.models.spec import DecoderSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    experts = qwen_experts(config, renormalise=True)
    return hybrid_decoder(config, [experts] * config.count("num_hidden_layers"), by_head=False)


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    classes=("Qwen3_5MoeForCausalLM",),
    spec=_spec,
    defaults=OF_CLASS
    | {
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    without_effect=OF_TRAINING,
)
