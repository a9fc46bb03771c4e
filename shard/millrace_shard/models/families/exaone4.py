"""EXAONE 4: norms after both halves and on heads; layers without a window do not rotate, if others have one."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import window_kinds
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.families.olmo2 import NAMES
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    HeadNormSpec,
    NormPlaces,
    NormSpec,
)


def _spec(config: ConfigReader) -> DecoderSpec:
    norm = HeadNormSpec(norm=NormSpec(eps=config.number("rms_norm_eps")))
    attention = replace(llama_attention(config), head_norm=norm)
    spec = llama_decoder(config, _layers(config, attention))
    layers = (replace(layer, norm_places=NormPlaces.AFTER) for layer in spec.layers)
    return replace(spec, layers=tuple(layers), names=NAMES)


def _layers(config: ConfigReader, attention: AttentionSpec) -> list[AttentionSpec]:
    window, pattern = (
        config.optional_count("sliding_window"),
        config.value("sliding_window_pattern"),
    )
    if window is None:
        config.value("layer_types")  # They have no effect then.
        return [attention] * config.count("num_hidden_layers")
    # Published configs have `layer_types`, and the same pattern as a text.
    kinds = window_kinds(config, pattern if isinstance(pattern, int) else None)
    by_kind = {
        "sliding_attention": replace(attention, window=window),
        "full_attention": replace(attention, rope=None),
    }
    return [by_kind[kind] for kind in kinds]


FAMILY = Family(
    model_type="exaone4",
    classes=("Exaone4ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "eos_token_id": 2,
    },
)
