"""Qwen3-Next: three of four layers are gated delta nets, the others attention with a gate; all have experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import OF_AXES, ConfigReader
from millrace_shard.models.families.expert_fields import (
    OF_TRAINING,
    qwen_is_sparse,
    softmax_rule,
)
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.families.qwen2_vl import with_axes
from millrace_shard.models.recurrent_spec import DeltaNetSpec
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertsSpec,
    FeedForwardSpec,
    GatedSpec,
    HeadNormSpec,
    LayerSpec,
    NormSpec,
    RouterSpec,
    SharedExpertSpec,
)

KINDS = ("linear_attention", "full_attention")


def hybrid_decoder(
    config: ConfigReader, feed_forwards: Sequence[FeedForwardSpec], *, by_head: bool
) -> DecoderSpec:
    """Delta nets and gated attention; `by_head` is as in DeltaNetSpec."""
    eps = config.number("rms_norm_eps")
    norm = NormSpec(eps=eps, plus_one=True, wide=True)
    plain = llama_attention(
        config, bias=config.flag("attention_bias"), rope_extra=OF_AXES, may_be_partial=True
    )
    plain = with_axes(config, plain, (11, 11, 10), alternate=True)
    attention = replace(plain, gated=True, head_norm=HeadNormSpec(norm=norm))
    recurrent = DeltaNetSpec(
        num_keys=config.count("linear_num_key_heads"),
        num_values=config.count("linear_num_value_heads"),
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        kernel=config.count("linear_conv_kernel_dim"),
        eps=eps,
        by_head=by_head,
    )
    if recurrent.num_values % recurrent.num_keys:
        raise UnsupportedModel(
            f"linear_num_key_heads={recurrent.num_keys} does not divide"
            f" linear_num_value_heads={recurrent.num_values}"
        )
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(
            LayerSpec(
                attention=attention,
                recurrent=recurrent if kind == "linear_attention" else None,
                feed_forward=each,
                norm=norm,
            )
            for kind, each in zip(layer_kinds(config), feed_forwards, strict=True)
        ),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
    )


def layer_kinds(config: ConfigReader) -> tuple[str, ...]:
    """The kind of each layer; without `layer_types`, every `full_attention_interval`-th has attention."""
    num_layers = config.count("num_hidden_layers")
    kinds, interval = config.layer_types(num_layers, KINDS), config.count("full_attention_interval")
    if kinds is None:
        kinds = tuple(KINDS[(layer + 1) % interval == 0] for layer in range(num_layers))
    if "full_attention" not in kinds:
        raise UnsupportedModel("layer_types has no layer with full_attention")
    return kinds


def qwen_experts(config: ConfigReader, *, renormalise: bool) -> ExpertsSpec:
    """Experts, and one that all tokens have, behind a gate."""
    count, gate = config.count("num_experts"), activation(config)
    shared = GatedSpec(
        intermediate_size=config.count("shared_expert_intermediate_size"), activation=gate
    )
    return ExpertsSpec(
        router=RouterSpec(
            num_experts=count, rule=softmax_rule(config, count, renormalise=renormalise)
        ),
        intermediate_size=config.count("moe_intermediate_size"),
        activation=gate,
        shared=SharedExpertSpec(mlp=shared, gated=True),
    )


def _spec(config: ConfigReader) -> DecoderSpec:
    experts = qwen_experts(config, renormalise=config.flag("norm_topk_prob"))
    dense = GatedSpec(
        intermediate_size=config.count("intermediate_size"), activation=activation(config)
    )
    halves = [experts if sparse else dense for sparse in qwen_is_sparse(config)]
    return hybrid_decoder(config, halves, by_head=True)


OF_CLASS = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 16,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""Defaults that this class in transformers has, and the classes of Qwen 3.5, too."""

FAMILY = Family(
    model_type="qwen3_next",
    classes=("Qwen3NextForCausalLM",),
    spec=_spec,
    defaults=OF_CLASS
    | {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    without_effect=OF_TRAINING,
)
