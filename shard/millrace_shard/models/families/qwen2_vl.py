"""The text part of Qwen 2 VL and Qwen 2.5 VL: Qwen 2 with positions of three axes."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import OF_AXES, ConfigReader, read_axes
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import qwen_windows
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import AttentionSpec, DecoderSpec


def with_axes(
    config: ConfigReader, attention: AttentionSpec, sections: tuple[int, ...], *, alternate: bool
) -> AttentionSpec:
    """`attention` whose rotation has three axes; `sections` are the class's."""
    assert attention.rope is not None
    axes = read_axes(config, attention.rope, sections, alternate=alternate)
    return replace(attention, rope=replace(attention.rope, axes=axes))


def _spec(config: ConfigReader) -> DecoderSpec:
    plain = replace(llama_attention(config, rope_extra=OF_AXES), qkv_bias=True)
    attention = with_axes(config, plain, (16, 24, 24), alternate=False)
    windows = qwen_windows(config)
    return llama_decoder(config, [replace(attention, window=window) for window in windows])


FAMILY = Family(
    model_type="qwen2_vl_text",
    same_types=("qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl"),
    classes=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    spec=_spec,
    defaults={
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_window_layers": 80,
        "eos_token_id": 151_645,
    },
)
