"""Baichuan and Baichuan 2: Llama with a fused projection; 13B has ALiBi, and the second a head of normalised rows.

transformers has no class for it, so that tests build its checkpoints from those for Llama.
"""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.bloom import alibi_slopes, check_positions
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import FAMILY as LLAMA
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec, LayerNames, WeightNames

VOCABULARY_OF_2 = 125_696
"""The only mark of Baichuan 2 in a config."""


def _spec(config: ConfigReader) -> DecoderSpec:
    # Only configs of 13B lack the field, and positions of 13B are biases of scores (ALiBi).
    has_slopes = config.value("max_position_embeddings") is None
    if has_slopes:
        longest = check_positions(config.count("model_max_length"))
        config = config.with_fields(max_position_embeddings=longest)
    attention = llama_attention(config)
    if has_slopes:
        attention = replace(attention, rope=None, slopes=alibi_slopes(attention.num_heads))
    spec = llama_decoder(config, [attention] * config.count("num_hidden_layers"))
    names = WeightNames(layer=LayerNames(qkv="self_attn.W_pack"))
    is_second = spec.vocab_size == VOCABULARY_OF_2
    return replace(spec, names=names, head_normalised=is_second)


FAMILY = Family(
    model_type="baichuan",
    classes=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    spec=_spec,
    defaults={
        **{name: value for name, value in LLAMA.defaults.items() if "position" not in name},
        "vocab_size": 64_000,
    },
)
