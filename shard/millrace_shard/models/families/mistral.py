"""Mistral 7B, Nemo and Small: Llama with a window, which most versions leave out."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = replace(llama_attention(config), window=config.optional_count("sliding_window"))
    return llama_decoder(config, [attention] * config.count("num_hidden_layers"))


FAMILY = Family(
    model_type="mistral",
    classes=("MistralForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)
