"""LFM2: short convolutions between gates, and some layers with attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.recurrent_spec import ShortConvSpec
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    FeedForwardSpec,
    GatedSpec,
    HeadNormSpec,
    LayerNames,
    LayerSpec,
    NormSpec,
    WeightNames,
)

KINDS = ("conv", "full_attention")
_EXPERTS = ExpertNames(
    router="feed_forward.gate",
    experts="feed_forward.experts",
    gate="w1",
    up="w3",
    down="w2",
    correction="feed_forward.expert_bias",
)
NAMES = WeightNames(
    layer=LayerNames(
        out="self_attn.out_proj",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        before_attention="operator_norm",
        before_mlp="ffn_norm",
        experts=(_EXPERTS,),
    ),
    norm="model.embedding_norm",
)


def conv_decoder(
    config: ConfigReader, kinds: Sequence[str], feed_forwards: Sequence[FeedForwardSpec]
) -> DecoderSpec:
    """Layers of these kinds, each with its feed-forward half."""
    hidden, norm = config.count("hidden_size"), NormSpec(eps=config.number("norm_eps"))
    attention = replace(llama_attention(config), head_norm=HeadNormSpec(norm=norm))
    conv = ShortConvSpec(
        channels=hidden, kernel=config.count("conv_L_cache"), bias=config.flag("conv_bias")
    )
    if "full_attention" not in kinds:
        raise UnsupportedModel("layer_types has no layer with full_attention")
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(
                attention=attention,
                recurrent=conv if kind == "conv" else None,
                feed_forward=each,
                norm=norm,
            )
            for kind, each in zip(kinds, feed_forwards, strict=True)
        ),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        names=NAMES,
    )


def _spec(config: ConfigReader) -> DecoderSpec:
    num_layers = config.count("num_hidden_layers")
    kinds, indexes = config.layer_types(num_layers, KINDS), config.value("full_attn_idxs")
    if kinds is None:
        kinds = tuple(KINDS[indexes is None or layer in indexes] for layer in range(num_layers))
    mlp = GatedSpec(intermediate_size=_width(config))
    return conv_decoder(config, kinds, [mlp] * num_layers)


def _width(config: ConfigReader) -> int:
    """The intermediate size: two thirds of the field, rounded up, unless the config turns that off."""
    width, factor = config.count("intermediate_size"), config.value("block_ffn_dim_multiplier")
    step = config.count("block_multiple_of")
    if not config.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if factor is None:
        return width
    return -(-int(config.number("block_ffn_dim_multiplier") * width) // step) * step


OF_CLASS = {
    "vocab_size": 65_536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "eos_token_id": 2,
}
"""Defaults of this class in transformers and of LFM2-MoE's."""
FAMILY = Family(
    model_type="lfm2",
    classes=("Lfm2ForCausalLM",),
    spec=_spec,
    defaults=OF_CLASS
    | {
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    aliases={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
)
