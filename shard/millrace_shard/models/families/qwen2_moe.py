"""Qwen 1.5 MoE and Qwen 2 MoE: Qwen 2 with experts, and one that all tokens have, behind a gate."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.expert_fields import (
    OF_TRAINING,
    mixture_decoder,
    qwen_is_sparse,
    softmax_rule,
)
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertsSpec,
    GatedSpec,
    RouterSpec,
    SharedExpertSpec,
)


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = replace(llama_attention(config), qkv_bias=config.flag("qkv_bias"))
    layers = [replace(attention, window=window) for window in _windows(config)]
    count, gate = config.count("num_experts"), activation(config)
    shared = GatedSpec(
        intermediate_size=config.count("shared_expert_intermediate_size"), activation=gate
    )
    experts = ExpertsSpec(
        router=RouterSpec(
            num_experts=count,
            rule=softmax_rule(config, count, renormalise=config.flag("norm_topk_prob")),
        ),
        intermediate_size=config.count("moe_intermediate_size"),
        activation=gate,
        shared=SharedExpertSpec(mlp=shared, gated=True),
    )
    return mixture_decoder(config, layers, experts, qwen_is_sparse(config))


def _windows(config: ConfigReader) -> list[int | None]:
    """The window of each layer; without `layer_types`, every other one below `max_window_layers` has it, if used."""
    num_layers = config.count("num_hidden_layers")
    is_used, first = config.flag("use_sliding_window"), config.whole("max_window_layers")
    kinds = config.layer_types(num_layers)
    if kinds is None:
        has_window = [is_used and layer % 2 == 0 and layer < first for layer in range(num_layers)]
    else:
        has_window = [kind == "sliding_attention" for kind in kinds]
    if not any(has_window):
        config.value("sliding_window")
        return [None] * num_layers
    window = config.count("sliding_window")
    return [window if has else None for has in has_window]


FAMILY = Family(
    model_type="qwen2_moe",
    classes=("Qwen2MoeForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    without_effect=OF_TRAINING,
)
