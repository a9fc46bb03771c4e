"""GLM-4.5 and 4.6: experts chosen by sigmoids with a correction, a shared expert, and dense layers at first."""

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
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    GatedSpec,
    HeadNormSpec,
    LayerNames,
    NormSpec,
    RouterSpec,
    SharedExpertSpec,
    WeightNames,
)

NAMES = WeightNames(layer=LayerNames(experts=(ExpertNames(shared="mlp.shared_experts"),)))


def _spec(config: ConfigReader) -> DecoderSpec:
    plain = llama_attention(config, may_be_partial=True)
    attention = replace(plain, qkv_bias=config.flag("attention_bias"))
    if config.flag("use_qk_norm"):
        norm = HeadNormSpec(norm=NormSpec(eps=config.number("rms_norm_eps")))
        attention = replace(attention, head_norm=norm)
    gate, width = activation(config), config.count("moe_intermediate_size")
    shared_width = width * config.count("n_shared_experts")
    count = config.count("n_routed_experts")
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=grouped_rule(config, count), correction=True),
        intermediate_size=width,
        activation=gate,
        shared=SharedExpertSpec(mlp=GatedSpec(intermediate_size=shared_width, activation=gate)),
    )
    num_layers, first = config.count("num_hidden_layers"), config.whole("first_k_dense_replace")
    is_sparse = [layer >= first for layer in range(num_layers)]
    spec = mixture_decoder(config, [attention] * num_layers, experts, is_sparse)
    more = config.whole("num_nextn_predict_layers")
    return replace(spec, names=NAMES, num_more_layers=more)


def grouped_rule(config: ConfigReader, count: int) -> RoutingRule:
    """DeepSeek's rule: sigmoids, with the best experts of the best groups."""
    groups, top_groups = config.count("n_group"), config.count("topk_group")
    top_k = experts_per_token(config, count)
    check_groups(count, groups, top_groups, top_k)
    return RoutingRule(
        top_k=top_k,
        scoring=Scoring.SIGMOID,
        renormalise=config.flag("norm_topk_prob"),
        num_groups=groups,
        top_groups=top_groups,
        scale=config.number("routed_scaling_factor"),
    )


def check_groups(count: int, groups: int, top_groups: int, top_k: int) -> None:
    """Raise UnsupportedModel unless the best `top_groups` of `groups` of `count` experts have `top_k` experts."""
    if count % groups or (groups > 1 and count // groups < 2):
        raise UnsupportedModel(f"n_group={groups} of {count} experts: groups must have two or more")
    if top_groups > groups or top_groups * (count // groups) < top_k:
        raise UnsupportedModel(
            f"topk_group={top_groups} of {groups} groups has not {top_k} experts"
        )


FAMILY = Family(
    model_type="glm4_moe",
    classes=("Glm4MoeForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    without_effect=(*OF_TRAINING, "num_mtp_layers"),
)
