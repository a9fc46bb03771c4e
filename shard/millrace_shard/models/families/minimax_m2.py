"""MiniMax M2: Mixtral with norms over the whole width of heads, a part of rotated channels, and sigmoid routers."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.expert_fields import (
    OF_TRAINING,
    experts_per_token,
    mixture_decoder,
)
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.families.mixtral import PUBLISHED
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    HeadNormSpec,
    LayerNames,
    NormSpec,
    RouterSpec,
    WeightNames,
)

OWN = ExpertNames(correction="mlp.e_score_correction_bias")
NAMES = WeightNames(
    layer=LayerNames(
        experts=(replace(PUBLISHED, correction="block_sparse_moe.e_score_correction_bias"), OWN)
    )
)


def _spec(config: ConfigReader) -> DecoderSpec:
    config.check("scoring_func", ("sigmoid",))
    config.check("use_routing_bias", (True,))
    config.check("qk_norm_type", ("per_layer",))
    config.check("shared_intermediate_size", (0,))
    num_layers, count = config.count("num_hidden_layers"), config.count("num_local_experts")
    rule = RoutingRule(
        top_k=experts_per_token(config, count), scoring=Scoring.SIGMOID, renormalise=True
    )
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule, correction=True),
        intermediate_size=config.count("intermediate_size"),
        activation=activation(config),
    )
    layers = [_attention(config)] * num_layers
    spec = mixture_decoder(config, layers, experts, [True] * num_layers)
    return replace(spec, names=NAMES)


def _attention(config: ConfigReader) -> AttentionSpec:
    norm = NormSpec(eps=config.number("rms_norm_eps"))
    attention = llama_attention(config, may_be_partial=True)
    rotary_dim = config.optional_count("rotary_dim")
    if rotary_dim is not None:
        # Published configs name the channels, and the share is 1 then.
        if rotary_dim % 2 or rotary_dim > attention.head_dim or attention.rope is None:
            raise UnsupportedModel(f"rotary_dim={rotary_dim} of heads of {attention.head_dim}")
        attention = replace(attention, rope=replace(attention.rope, rotary_dim=rotary_dim))
    return replace(attention, head_norm=HeadNormSpec(norm=norm, whole_width=True))


FAMILY = Family(
    model_type="minimax_m2",
    classes=("MiniMaxM2ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196_608,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000.0,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "eos_token_id": 200_020,
    },
    aliases={"num_experts": "num_local_experts"},
    without_effect=(*OF_TRAINING, "router_jitter_noise"),
)
