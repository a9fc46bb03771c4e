"""Hunyuan MoE (A13B): Hunyuan dense with experts and a shared one."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.hunyuan_v1_dense import FAMILY as DENSE
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    GatedSpec,
    RouterSpec,
    SharedExpertSpec,
)

EXPERTS = ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp")


def _spec(config: ConfigReader) -> DecoderSpec:
    config.check("use_cla", (False,))
    spec = DENSE.spec(config)
    dense = spec.layers[0].feed_forward
    assert isinstance(dense, GatedSpec)
    count, top_k = _of_all_layers(config, "num_experts"), _of_all_layers(config, "moe_topk")
    if top_k > count:
        raise UnsupportedModel(f"moe_topk={top_k} of {count} experts")
    # transformers takes the width of experts and of the shared one from intermediate_size.
    for name, width in (
        ("moe_intermediate_size", dense.intermediate_size),
        ("num_shared_expert", 1),
    ):
        if config.value(name) is not None and _of_all_layers(config, name) != width:
            raise UnsupportedModel(f"{name}={config.value(name)!r} is not supported, only {width}")
    rule = RoutingRule(top_k=top_k, scoring=Scoring.SOFTMAX, renormalise=True)
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule),
        intermediate_size=dense.intermediate_size,
        activation=dense.activation,
        shared=SharedExpertSpec(mlp=dense),
    )
    layers = (replace(layer, feed_forward=experts) for layer in spec.layers)
    layer_names = replace(spec.names.layer, experts=(EXPERTS,))
    return replace(spec, layers=tuple(layers), names=replace(spec.names, layer=layer_names))


def _of_all_layers(config: ConfigReader, name: str) -> int:
    """A whole number, which published configs have once or for each layer; layers with other ones are refused."""
    value = config.value(name)
    first, *others = value if isinstance(value, list) and value else [value]
    if any(other != first for other in others) or type(first) is not int or first < 1:
        raise UnsupportedModel(f"{name}={value!r} must be one positive whole number for all layers")
    return first


FAMILY = Family(
    model_type="hunyuan_v1_moe",
    classes=("HunYuanMoEV1ForCausalLM",),
    spec=_spec,
    defaults={**DENSE.defaults, "num_experts": 1, "moe_topk": 1},
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    without_effect=(*DENSE.without_effect, "output_router_logits", "sep_token_id"),
)
