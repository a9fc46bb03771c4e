"""ERNIE 4.5 mixtures: ERNIE 4.5 with experts chosen by softmax and a correction, and shared experts."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.expert_fields import OF_TRAINING, mixture_decoder
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    GatedSpec,
    LayerNames,
    RouterSpec,
    SharedExpertSpec,
    WeightNames,
)

EXPERTS = ExpertNames(
    correction="mlp.moe_statics.e_score_correction_bias", shared="mlp.shared_experts"
)


def _spec(config: ConfigReader) -> DecoderSpec:
    # Shared experts would have biases, too.
    config.check("use_bias", (False,))
    layers = [llama_attention(config, interleaved=True)] * config.count("num_hidden_layers")
    spec = mixture_decoder(config, layers, _experts(config), _is_sparse(config, len(layers)))
    return replace(spec, names=WeightNames(layer=LayerNames(experts=(EXPERTS,))))


def _experts(config: ConfigReader) -> ExpertsSpec:
    count, top_k = config.count("moe_num_experts"), config.count("moe_k")
    if top_k > count:
        raise UnsupportedModel(f"moe_k={top_k} of {count} experts")
    least = config.number("moe_norm_min")
    # The best of `count` shares have at least this sum.
    if least > top_k / count:
        raise UnsupportedModel(
            f"moe_norm_min={least} is not supported, only {top_k / count} or less"
        )
    width, gate = config.count("moe_intermediate_size"), activation(config)
    shared = config.whole("moe_num_shared_experts")
    rule = RoutingRule(top_k=top_k, scoring=Scoring.SOFTMAX, renormalise=True)
    mlp = GatedSpec(intermediate_size=shared * width, activation=gate)
    return ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule, correction=True),
        intermediate_size=width,
        activation=gate,
        shared=SharedExpertSpec(mlp=mlp) if shared else None,
    )


def _is_sparse(config: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer has experts: every `moe_layer_interval`-th, from a first one to a last one."""
    first, interval = config.whole("moe_layer_start_index"), config.count("moe_layer_interval")
    last = config.value("moe_layer_end_index")
    end = num_layers if last in (-1, None) else config.whole("moe_layer_end_index") + 1
    return [(layer + 1) % interval == 0 and first <= layer < end for layer in range(num_layers)]


FAMILY = Family(
    model_type="ernie4_5_moe",
    classes=("Ernie4_5_MoeForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    aliases={
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "num_local_experts": "moe_num_experts",
    },
    without_effect=OF_TRAINING,
)
