"""LFM2 MoE: LFM2 with experts chosen by sigmoids, behind some dense layers."""

from __future__ import annotations

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.expert_fields import OF_TRAINING, experts_per_token
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.lfm2 import KINDS, OF_CLASS, conv_decoder
from millrace_shard.models.spec import DecoderSpec, ExpertsSpec, GatedSpec, RouterSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    num_layers, count = config.count("num_hidden_layers"), config.count("num_experts")
    kinds, first = config.layer_types(num_layers, KINDS), config.whole("num_dense_layers")
    if kinds is None:
        raise UnsupportedModel("layer_types is missing from the config of lfm2_moe")
    rule = RoutingRule(
        top_k=experts_per_token(config, count),
        scoring=Scoring.SIGMOID,
        renormalise=config.flag("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
    )
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule, correction=config.flag("use_expert_bias")),
        intermediate_size=config.count("moe_intermediate_size"),
    )
    dense = GatedSpec(intermediate_size=config.count("intermediate_size"))
    halves = [dense if layer < first else experts for layer in range(num_layers)]
    return conv_decoder(config, kinds, halves)


FAMILY = Family(
    model_type="lfm2_moe",
    classes=("Lfm2MoeForCausalLM",),
    spec=_spec,
    defaults=OF_CLASS
    | {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    aliases={"tie_embedding": "tie_word_embeddings"},
    without_effect=OF_TRAINING,
)
