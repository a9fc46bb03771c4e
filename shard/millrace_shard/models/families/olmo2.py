"""OLMo 2: norms only after both halves, and over the whole width of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    HeadNormSpec,
    LayerNames,
    NormPlaces,
    NormSpec,
    WeightNames,
)

NAMES = WeightNames(
    layer=LayerNames(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    )
)


def olmo_attention(config: ConfigReader, layer_kind: str | None = None) -> AttentionSpec:
    """Attention with norms over the whole width of queries and keys; see `llama_attention` for `layer_kind`."""
    norm = NormSpec(eps=config.number("rms_norm_eps"), wide=True)
    head_norm = HeadNormSpec(norm=norm, whole_width=True)
    plain = llama_attention(config, layer_kind, bias=config.flag("attention_bias"))
    return replace(plain, head_norm=head_norm)


def olmo_decoder(config: ConfigReader, attention: list[AttentionSpec]) -> DecoderSpec:
    """A decoder of layers like OLMo's, one for each of `attention`."""
    spec = llama_decoder(config, attention)
    norm = replace(spec.norm, wide=True)
    layers = (replace(layer, norm=norm, norm_places=NormPlaces.AFTER) for layer in spec.layers)
    return replace(spec, layers=tuple(layers), norm=norm, names=NAMES)


def _spec(config: ConfigReader) -> DecoderSpec:
    return olmo_decoder(config, [olmo_attention(config)] * config.count("num_hidden_layers"))


FAMILY = Family(
    model_type="olmo2",
    classes=("Olmo2ForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "eos_token_id": 50_279,
    },
)
