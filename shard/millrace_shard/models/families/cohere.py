"""Command R: one LayerNorm for attention and feed-forward in parallel, interleaved rotary embeddings."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedSpec,
    HeadNormSpec,
    LayerNames,
    LayerSpec,
    NormPlaces,
    NormSpec,
    WeightNames,
)

NAMES = WeightNames(layer=LayerNames(before_mlp=None))


def cohere_attention(config: ConfigReader) -> AttentionSpec:
    return llama_attention(config, bias=config.flag("attention_bias"), interleaved=True)


def cohere_norm(config: ConfigReader) -> NormSpec:
    return NormSpec(eps=config.number("layer_norm_eps"), centred=True, wide=True)


def cohere_decoder(config: ConfigReader, attention: list[AttentionSpec]) -> DecoderSpec:
    """A decoder of layers like Cohere's, one for each of `attention`."""
    norm = cohere_norm(config)
    mlp = GatedSpec(
        intermediate_size=config.count("intermediate_size"), activation=activation(config)
    )
    layers = (
        LayerSpec(attention=each, feed_forward=mlp, norm=norm, norm_places=NormPlaces.PARALLEL)
        for each in attention
    )
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(layers),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        logit_multiplier=config.number("logit_scale"),
        names=NAMES,
    )


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = cohere_attention(config)
    if config.flag("use_qk_norm"):
        head_norm = HeadNormSpec(norm=cohere_norm(config), weight_per_head=True)
        attention = replace(attention, head_norm=head_norm)
    return cohere_decoder(config, [attention] * config.count("num_hidden_layers"))


FAMILY = Family(
    model_type="cohere",
    classes=("CohereForCausalLM",),
    spec=_spec,
    defaults={
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
        "eos_token_id": 255_001,
    },
)
