"""GLM-4 (0414): norms around both halves, interleaved rotary embeddings of half a head, fused gates."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec, LayerNames, NormPlaces, WeightNames

NAMES = WeightNames(
    layer=LayerNames(
        gate_up="mlp.gate_up_proj",
        after_attention="post_self_attn_layernorm",
        after_mlp="post_mlp_layernorm",
    )
)


def _spec(config: ConfigReader) -> DecoderSpec:
    plain = llama_attention(config, interleaved=True, may_be_partial=True)
    attention = replace(plain, qkv_bias=config.flag("attention_bias"))
    spec = llama_decoder(config, [attention] * config.count("num_hidden_layers"))
    layers = (replace(layer, norm_places=NormPlaces.AROUND) for layer in spec.layers)
    return replace(spec, layers=tuple(layers), names=NAMES)


FAMILY = Family(
    model_type="glm4",
    classes=("Glm4ForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1.5625e-07,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
)
