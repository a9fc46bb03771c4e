"""Granite 3 MoE: Granite with experts, whose gates and ups are stacked in the file."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.expert_fields import OF_TRAINING, experts_per_token
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.granite import FAMILY as GRANITE
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    GatedSpec,
    LayerNames,
    RouterSpec,
    WeightNames,
)

_PUBLISHED = ExpertNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe",
    stacked_gate_up="input_linear.weight",
    stacked_down="output_linear.weight",
)
_OWN = ExpertNames(router="block_sparse_moe.router", experts="block_sparse_moe.experts")
NAMES = WeightNames(layer=LayerNames(experts=(_PUBLISHED, _OWN)))


def _spec(config: ConfigReader) -> DecoderSpec:
    spec, count = GRANITE.spec(config), config.count("num_local_experts")
    dense = spec.layers[0].feed_forward
    assert isinstance(dense, GatedSpec)
    rule = RoutingRule(top_k=experts_per_token(config, count), scoring=Scoring.SOFTMAX_OF_CHOSEN)
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule),
        intermediate_size=dense.intermediate_size,
        activation=dense.activation,
    )
    layers = (replace(layer, feed_forward=experts) for layer in spec.layers)
    return replace(spec, layers=tuple(layers), names=NAMES)


FAMILY = Family(
    model_type="granitemoe",
    classes=("GraniteMoeForCausalLM",),
    spec=_spec,
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    without_effect=OF_TRAINING,
)
