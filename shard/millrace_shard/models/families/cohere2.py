"""Command R7B and A: Command R with a window on three of four layers, and rotary embeddings only on those three."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.cohere import cohere_attention, cohere_decoder
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import window_kinds
from millrace_shard.models.spec import DecoderSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = cohere_attention(config)
    layers = {
        "sliding_attention": replace(attention, window=config.count("sliding_window")),
        "full_attention": replace(attention, rope=None),
    }
    kinds = window_kinds(config, config.count("sliding_window_pattern"))
    return cohere_decoder(config, [layers[kind] for kind in kinds])


FAMILY = Family(
    model_type="cohere2",
    classes=("Cohere2ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 8192,
        "intermediate_size": 22_528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
        "eos_token_id": 255_001,
    },
)
