"""Gemma 2: norms around both halves, soft caps, and a window on every other layer."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation, window_kinds
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedSpec,
    LayerNames,
    LayerSpec,
    NormPlaces,
    NormSpec,
    WeightNames,
)

NAMES = WeightNames(
    layer=LayerNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )
)


def _spec(config: ConfigReader) -> DecoderSpec:
    full, window = gemma_attention(config), config.count("sliding_window")
    attention = {"full_attention": full, "sliding_attention": replace(full, window=window)}
    return gemma_decoder(config, [attention[kind] for kind in window_kinds(config, 2)])


def gemma_attention(
    config: ConfigReader, layer_kind: str | None = None, theta_field: str = "rope_theta"
) -> AttentionSpec:
    """Attention without norms and window; see `llama_attention` for `layer_kind` and `theta_field`."""
    bias = config.flag("attention_bias")
    return replace(
        llama_attention(config, layer_kind, bias=bias, theta_field=theta_field),
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        softcap=config.optional_number("attn_logit_softcapping"),
    )


def gemma_decoder(config: ConfigReader, attention: list[AttentionSpec]) -> DecoderSpec:
    """A decoder of layers like Gemma's, one for each of `attention`."""
    norm = NormSpec(eps=config.number("rms_norm_eps"), plus_one=True, wide=True)
    hidden_size = config.count("hidden_size")
    mlp = GatedSpec(
        intermediate_size=config.count("intermediate_size"),
        activation=activation(config, "hidden_activation"),
    )
    layers = (
        LayerSpec(attention=each, feed_forward=mlp, norm=norm, norm_places=NormPlaces.AROUND)
        for each in attention
    )
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        embedding_multiplier=hidden_size**0.5,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        names=NAMES,
    )


FAMILY = Family(
    model_type="gemma2",
    classes=("Gemma2ForCausalLM",),
    spec=_spec,
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "vocab_size": 256_000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
)
