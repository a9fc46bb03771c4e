"""Llama 1 to 3.3, SmolLM 2, and the many checkpoints that call themselves Llama."""

from __future__ import annotations

from collections.abc import Sequence

from millrace_shard.models.config import ConfigReader, read_rope
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import Heads, activation
from millrace_shard.models.spec import AttentionSpec, DecoderSpec, GatedSpec, LayerSpec, NormSpec


def llama_attention(
    config: ConfigReader,
    layer_kind: str | None = None,
    *,
    bias: bool = False,
    theta_field: str = "rope_theta",
    interleaved: bool = False,
    rope_extra: frozenset[str] = frozenset(),
    may_be_partial: bool = False,
) -> AttentionSpec:
    """Attention without norms; `bias` is for all four projections.

    The other arguments describe the rotary embedding, see `read_rope`.
    """
    heads = Heads(config)
    rope = read_rope(
        config,
        head_dim=heads.dim,
        layer_kind=layer_kind,
        theta_field=theta_field,
        interleaved=interleaved,
        extra=rope_extra,
        may_be_partial=may_be_partial,
    )
    return AttentionSpec(
        num_heads=heads.count,
        num_kv_heads=heads.kv_count,
        head_dim=heads.dim,
        scale=heads.dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
    )


def llama_decoder(
    config: ConfigReader, attention: Sequence[AttentionSpec], *, mlp_bias: bool = False
) -> DecoderSpec:
    """A decoder of layers like Llama's, one for each of `attention`."""
    norm = NormSpec(eps=config.number("rms_norm_eps"))
    mlp = GatedSpec(
        intermediate_size=config.count("intermediate_size"),
        activation=activation(config),
        bias=mlp_bias,
    )
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(LayerSpec(attention=each, feed_forward=mlp, norm=norm) for each in attention),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
    )


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = llama_attention(config, bias=config.flag("attention_bias"))
    layers = [attention] * config.count("num_hidden_layers")
    return llama_decoder(config, layers, mlp_bias=config.flag("mlp_bias"))


FAMILY = Family(
    model_type="llama",
    classes=("LlamaForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "max_position_embeddings": 2048,
    },
)
