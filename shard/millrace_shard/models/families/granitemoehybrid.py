"""Granite 4: Mamba-2 layers, some layers with attention, and perhaps experts in addition to a dense half."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.bamba import OF_MAMBA, mamba2_spec
from millrace_shard.models.families.expert_fields import OF_TRAINING, experts_per_token
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    FeedForwardSpec,
    GatedSpec,
    LayerNames,
    LayerSpec,
    NormSpec,
    RouterSpec,
    SharedExpertSpec,
    WeightNames,
)

_RECURRENT = ("mamba", "linear_attention")
_KINDS = (*_RECURRENT, "attention", "full_attention")
_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe",
    stacked_gate_up="input_linear.weight",
    stacked_down="output_linear.weight",
    shared="shared_mlp",
    shared_gate_up="input_linear",
    shared_down="output_linear",
)
NAMES = WeightNames(
    layer=LayerNames(
        gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear", experts=(_EXPERTS,)
    )
)


def _spec(config: ConfigReader) -> DecoderSpec:
    num_layers, norm = (
        config.count("num_hidden_layers"),
        NormSpec(eps=config.number("rms_norm_eps")),
    )
    kinds = config.layer_types(num_layers, _KINDS)
    if kinds is None or set(kinds) <= set(_RECURRENT):
        raise UnsupportedModel("layer_types has no layer with attention")
    config.check("position_embedding_type", ("rope", "nope"))
    attention = replace(
        llama_attention(config, bias=config.flag("attention_bias")),
        scale=config.number("attention_multiplier"),
    )
    if config.value("position_embedding_type") != "rope":
        attention = replace(attention, rope=None)
    half, mamba = _feed_forward(config), mamba2_spec(config)
    multiplier = config.number("residual_multiplier")
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(
            LayerSpec(
                attention=attention,
                recurrent=mamba if kind in _RECURRENT else None,
                feed_forward=half,
                norm=norm,
                residual_multiplier=multiplier,
            )
            for kind in kinds
        ),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        embedding_multiplier=config.number("embedding_multiplier"),
        logit_multiplier=1 / config.number("logits_scaling"),
        names=NAMES,
    )


def _feed_forward(config: ConfigReader) -> FeedForwardSpec:
    gate, count = activation(config), config.whole("num_local_experts")
    dense = GatedSpec(intermediate_size=config.count("shared_intermediate_size"), activation=gate)
    if not count:
        for name in ("intermediate_size", "num_experts_per_tok"):
            config.value(name)
        return dense
    rule = RoutingRule(top_k=experts_per_token(config, count), scoring=Scoring.SOFTMAX_OF_CHOSEN)
    return ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule),
        intermediate_size=config.count("intermediate_size"),
        activation=gate,
        shared=SharedExpertSpec(mlp=dense),
    )


FAMILY = Family(
    model_type="granitemoehybrid",
    classes=("GraniteMoeHybridForCausalLM",),
    spec=_spec,
    defaults=OF_MAMBA
    | {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "eos_token_id": 2,
    },
    without_effect=(*OF_TRAINING, "mamba_chunk_size"),
)
