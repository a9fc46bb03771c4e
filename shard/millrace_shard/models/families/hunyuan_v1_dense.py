"""Hunyuan dense: Llama with norms of heads after their rotation, and a base of rotary embeddings that alpha scales."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader, is_number, rope_parameters
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    HeadNormSpec,
    LayerNames,
    NormSpec,
    WeightNames,
)

_UNUSED = frozenset(("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
"""Parameters that published configs have in addition to alpha."""
LARGEST_ALPHA = 1_000_000


def _spec(config: ConfigReader) -> DecoderSpec:
    norm = NormSpec(eps=config.number("rms_norm_eps"))
    attention = replace(_attention(config), head_norm=HeadNormSpec(norm=norm, after_rope=True))
    spec = llama_decoder(config, [attention] * config.count("num_hidden_layers"))
    names = LayerNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
    return replace(spec, names=WeightNames(layer=names))


def _attention(config: ConfigReader) -> AttentionSpec:
    """Attention without norms. A fixed alpha makes the "dynamic" scaling static."""
    bias, parameters = config.flag("attention_bias"), rope_parameters(config)
    alpha = parameters.get("alpha")
    kind = parameters.get("rope_type") or parameters.get("type")
    if not alpha or kind != "dynamic":
        return llama_attention(config, bias=bias)
    plain = llama_attention(config, bias=bias, rope_extra=_UNUSED)
    assert plain.rope is not None
    if not is_number(alpha) or not 1 <= alpha <= LARGEST_ALPHA:
        raise UnsupportedModel(
            f"alpha={alpha!r} in rope_parameters must be a number from 1 to {LARGEST_ALPHA}"
        )
    theta = plain.rope.theta * alpha ** (plain.head_dim / (plain.head_dim - 2))
    return replace(plain, rope=replace(plain.rope, theta=theta, scaling=None))


FAMILY = Family(
    model_type="hunyuan_v1_dense",
    classes=("HunYuanDenseV1ForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
    without_effect=("eod_token_id",),
)
