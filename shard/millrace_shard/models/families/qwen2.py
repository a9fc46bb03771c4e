"""Qwen 2 and 2.5: biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import qwen_windows
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = replace(llama_attention(config), qkv_bias=True)
    windows = qwen_windows(config)
    return llama_decoder(config, [replace(attention, window=window) for window in windows])


FAMILY = Family(
    model_type="qwen2",
    classes=("Qwen2ForCausalLM",),
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
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
