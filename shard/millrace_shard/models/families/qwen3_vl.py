"""The text part of Qwen 3 VL: Qwen 3 with positions of three axes, whose channels alternate."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import OF_AXES, ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.families.qwen2_vl import with_axes
from millrace_shard.models.spec import AttentionSpec, DecoderSpec, HeadNormSpec, NormSpec

SECTIONS = (24, 20, 20)


def qwen3_vl_attention(config: ConfigReader) -> AttentionSpec:
    norm = HeadNormSpec(norm=NormSpec(eps=config.number("rms_norm_eps")))
    plain = llama_attention(config, bias=config.flag("attention_bias"), rope_extra=OF_AXES)
    return with_axes(config, replace(plain, head_norm=norm), SECTIONS, alternate=True)


def _spec(config: ConfigReader) -> DecoderSpec:
    return llama_decoder(config, [qwen3_vl_attention(config)] * config.count("num_hidden_layers"))


FAMILY = Family(
    model_type="qwen3_vl_text",
    classes=("Qwen3VLForConditionalGeneration",),
    spec=_spec,
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
)
