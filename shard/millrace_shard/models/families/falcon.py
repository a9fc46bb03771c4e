"""Falcon 7B, 40B, 180B and 11B: fused projections, one or two norms before both halves, and no gates."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader, read_rope
from millrace_shard.models.families.bloom import NAMES as OF_BLOOM
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.gptj import head_width, layer_norm, plain_gelu
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedSpec,
    LayerSpec,
    NormPlaces,
    WeightNames,
)


def _spec(config: ConfigReader) -> DecoderSpec:
    hidden_size, attention = config.count("hidden_size"), _attention(config)
    norm = layer_norm(config)
    mlp = GatedSpec(
        intermediate_size=config.optional_count("ffn_hidden_size") or 4 * hidden_size,
        activation=plain_gelu(config, "activation"),
        bias=config.flag("bias"),
    )
    is_new, is_parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
    if is_new and not is_parallel:
        raise UnsupportedModel("parallel_attn=False is not supported with new_decoder_architecture")
    places = NormPlaces.PARALLEL if is_parallel else NormPlaces.BEFORE
    layer = LayerSpec(attention=attention, feed_forward=mlp, norm=norm, norm_places=places)
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.count("num_hidden_layers"),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        names=_names(config, is_new=is_new, is_parallel=is_parallel),
    )


def _names(config: ConfigReader, *, is_new: bool, is_parallel: bool) -> WeightNames:
    config.check("num_ln_in_parallel_attn", (1, 2) if is_new else (1,))
    layer = OF_BLOOM.layer
    if is_new and config.value("num_ln_in_parallel_attn") != 1:
        layer = replace(layer, before_attention="ln_attn", before_mlp="ln_mlp")
    elif is_parallel:
        layer = replace(layer, before_mlp=None)
    return replace(OF_BLOOM, layer=layer)


def _attention(config: ConfigReader) -> AttentionSpec:
    heads, is_new = config.count("num_attention_heads"), config.flag("new_decoder_architecture")
    head_dim = head_width(heads, config.count("hidden_size"))
    multi_query, kv_heads = config.flag("multi_query"), config.optional_count("num_kv_heads")
    if not is_new and multi_query:
        kv_heads = 1
    kv_heads = kv_heads or heads
    if heads % kv_heads or not (is_new or kv_heads in {1, heads}):
        raise UnsupportedModel(f"num_kv_heads={kv_heads} does not divide {heads} heads")
    if config.flag("alibi"):
        raise UnsupportedModel(
            "alibi=True is not supported for falcon: its class rounds the bias of each position to bfloat16"
        )
    bias = config.flag("bias")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim=head_dim),
        by_group=kv_heads != 1,
        qkv_bias=bias,
        out_bias=bias,
    )


FAMILY = Family(
    model_type="falcon",
    classes=("FalconForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "layer_norm_epsilon": 1e-5,
        "multi_query": True,
        "parallel_attn": True,
        "max_position_embeddings": 2048,
        "activation": "gelu",
        "tie_word_embeddings": True,
        "eos_token_id": 11,
    },
    without_effect=("hidden_dropout",),
)
