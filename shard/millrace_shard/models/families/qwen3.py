"""Qwen 3: a norm on each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import qwen_windows
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec, HeadNormSpec, NormSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    norm = HeadNormSpec(norm=NormSpec(eps=config.number("rms_norm_eps")))
    plain = llama_attention(config, bias=config.flag("attention_bias"))
    attention = replace(plain, head_norm=norm)
    windows = qwen_windows(config)
    return llama_decoder(config, [replace(attention, window=window) for window in windows])


FAMILY = Family(
    model_type="qwen3",
    classes=("Qwen3ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
