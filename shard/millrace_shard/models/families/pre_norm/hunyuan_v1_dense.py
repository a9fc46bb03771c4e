"""Hunyuan dense: Llama with norms of heads after their rotation, and a base of rotary embeddings that alpha scales."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config.config_reader import ConfigReader
from millrace_shard.models.config.rope_fields import read_rope, rope_parameters
from millrace_shard.models.families.common_fields import Heads
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.pre_norm.llama import llama_decoder
from millrace_shard.models.spec.attention_spec import AttentionSpec
from millrace_shard.models.spec.decoder_spec import DecoderSpec
from millrace_shard.models.spec.norm_spec import HeadNormSpec, NormSpec
from millrace_shard.models.spec.rope_spec import RopeSpec
from millrace_shard.models.spec.weight_names import LayerNames, WeightNames

_UNUSED = frozenset(("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
"""Parameters that published configs have beside alpha."""


def _spec(config: ConfigReader) -> DecoderSpec:
    heads, bias = Heads(config), config.flag("attention_bias")
    norm = NormSpec(eps=config.number("rms_norm_eps"))
    attention = AttentionSpec(
        num_heads=heads.count,
        num_kv_heads=heads.kv_count,
        head_dim=heads.dim,
        scale=heads.dim**-0.5,
        rope=_rope(config, heads.dim),
        head_norm=HeadNormSpec(norm=norm, after_rope=True),
        qkv_bias=bias,
        out_bias=bias,
    )
    spec = llama_decoder(config, [attention] * config.count("num_hidden_layers"))
    names = LayerNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
    return replace(spec, names=WeightNames(layer=names))


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """A fixed alpha makes the "dynamic" scaling static."""
    parameters = rope_parameters(config)
    alpha = parameters.get("alpha")
    kind = parameters.get("rope_type") or parameters.get("type")
    if not alpha or kind != "dynamic":
        return read_rope(config, head_dim=head_dim)
    rope = read_rope(config, head_dim=head_dim, extra=_UNUSED)
    theta = rope.theta * float(alpha) ** (head_dim / (head_dim - 2))
    return replace(rope, theta=theta, scaling=None)


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
