"""DeepSeek V3, R1 and Kimi K2: attention over latents, and experts chosen by sigmoids with a correction in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader, read_rope, rope_parameters, yarn_stretch
from millrace_shard.models.families.expert_fields import OF_TRAINING, mixture_decoder
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.glm4_moe import NAMES, grouped_rule
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    GatedSpec,
    LatentSpec,
    NormSpec,
    RouterSpec,
    SharedExpertSpec,
)

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says."""
DERIVED = ("qk_head_dim", "head_dim", "num_key_value_heads")
"""Fields that follow from others."""


def latent_attention(config: ConfigReader, *, interleaved: bool) -> AttentionSpec:
    """Attention over latents with rotated keys."""
    plain = unrotated_latents(config)
    assert plain.latent is not None
    rope = read_rope(config, head_dim=plain.latent.rope_dim, interleaved=interleaved)
    if rope.scaling is None:
        return replace(plain, rope=rope)
    parameters = rope_parameters(config)
    all_dim, factor = parameters.get("mscale_all_dim"), getattr(rope.scaling, "factor", None)
    stretch = yarn_stretch(factor, float(all_dim)) if all_dim and factor else 1.0
    return replace(plain, rope=rope, scale=plain.scale * stretch * stretch)


def unrotated_latents(config: ConfigReader) -> AttentionSpec:
    """Attention over latents, of which the first `kv_lora_rank` channels of a cached key are the values."""
    config.check("index_topk", ())
    rope_dim, key_dim = config.count("qk_rope_head_dim"), config.count("qk_nope_head_dim")
    query_dim, bias = config.optional_count("q_lora_rank"), config.flag("attention_bias")
    if bias and query_dim is None:
        raise UnsupportedModel("attention_bias=True is not supported without a q_lora_rank")
    latent = LatentSpec(
        dim=config.count("kv_lora_rank"),
        rope_dim=rope_dim,
        key_dim=key_dim,
        value_dim=config.count("v_head_dim"),
        norm=NormSpec(eps=LATENT_EPS),
        query_dim=query_dim,
        bias=bias,
    )
    return AttentionSpec(
        num_heads=config.count("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.dim + rope_dim,
        scale=latent.head_width**-0.5,
        rope=None,
        out_bias=bias,
        latent=latent,
    )


def latent_mixture(
    config: ConfigReader,
    router: RouterSpec,
    is_sparse: Sequence[bool],
    *,
    interleaved: bool,
) -> DecoderSpec:
    """A decoder over latents, in which the layers that `is_sparse` names have experts and a shared one."""
    attention = latent_attention(config, interleaved=interleaved)
    experts = shared_mixture(config, router)
    spec = mixture_decoder(config, [attention] * len(is_sparse), experts, is_sparse)
    more = config.whole("num_nextn_predict_layers")
    return replace(spec, names=NAMES, num_more_layers=more)


def shared_mixture(config: ConfigReader, router: RouterSpec) -> ExpertsSpec:
    """Experts, and some that all tokens have, as one of their common width."""
    gate, width = activation(config), config.count("moe_intermediate_size")
    shared_width = width * config.count("n_shared_experts")
    return ExpertsSpec(
        router=router,
        intermediate_size=width,
        activation=gate,
        shared=SharedExpertSpec(mlp=GatedSpec(intermediate_size=shared_width, activation=gate)),
    )


def sparse_after(config: ConfigReader) -> list[bool]:
    """Whether each layer has experts: all after the first `first_k_dense_replace`."""
    config.check("moe_layer_freq", (1,))
    first = config.whole("first_k_dense_replace")
    return [layer >= first for layer in range(config.count("num_hidden_layers"))]


def _spec(config: ConfigReader) -> DecoderSpec:
    config.check("scoring_func", ("sigmoid",))
    config.check("topk_method", ("noaux_tc",))
    count = config.count("n_routed_experts")
    router = RouterSpec(num_experts=count, rule=grouped_rule(config, count), correction=True)
    is_interleaved = config.flag("rope_interleave")
    return latent_mixture(config, router, sparse_after(config), interleaved=is_interleaved)


FAMILY = Family(
    model_type="deepseek_v3",
    same_types=("kimi_k2",),
    classes=("DeepseekV3ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "eos_token_id": 1,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    without_effect=(*OF_TRAINING, *DERIVED, "num_mtp_layers"),
)
