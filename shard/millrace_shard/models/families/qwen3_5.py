"""Qwen 3.5 and 3.6, their text part too: Qwen3-Next with a plain feed-forward half."""

from __future__ import annotations

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.qwen3_next import OF_CLASS, hybrid_decoder
from millrace_shard.models.spec import DecoderSpec, GatedSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    mlp = GatedSpec(
        intermediate_size=config.count("intermediate_size"), activation=activation(config)
    )
    return hybrid_decoder(config, [mlp] * config.count("num_hidden_layers"), by_head=False)


FAMILY = Family(
    model_type="qwen3_5_text",
    classes=("Qwen3_5ForCausalLM",),
    spec=_spec,
    defaults=OF_CLASS
    | {
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
)
