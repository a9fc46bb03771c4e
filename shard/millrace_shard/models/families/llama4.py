"""Llama 4, the text part: chunked attention, layers without rotation, and experts whose inputs are scaled."""

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
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    GatedSpec,
    HeadNormSpec,
    LayerNames,
    NormSpec,
    QueryScaling,
    RouterSpec,
    SharedExpertSpec,
    WeightNames,
)

MLP = "feed_forward"
EXPERTS = ExpertNames(
    router=f"{MLP}.router",
    experts=f"{MLP}.experts",
    transposed=True,
    shared=f"{MLP}.shared_expert",
)
NAMES = WeightNames(
    layer=LayerNames(
        gate=f"{MLP}.gate_proj", up=f"{MLP}.up_proj", down=f"{MLP}.down_proj", experts=(EXPERTS,)
    )
)
CHUNKED = "chunked_attention"


def _spec(config: ConfigReader) -> DecoderSpec:
    layers = _attentions(config)
    count, gate = config.count("num_local_experts"), activation(config)
    mlp = GatedSpec(intermediate_size=config.count("intermediate_size"), activation=gate)
    rule = RoutingRule(top_k=experts_per_token(config, count), scoring=Scoring.SIGMOID)
    experts = ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule),
        intermediate_size=mlp.intermediate_size,
        activation=gate,
        shared=SharedExpertSpec(mlp=mlp),
        scales_inputs=True,
    )
    spec = mixture_decoder(config, layers, experts, _is_sparse(config, len(layers)))
    dense = GatedSpec(intermediate_size=config.count("intermediate_size_mlp"), activation=gate)
    halves = (dense if layer.feed_forward == mlp else layer.feed_forward for layer in spec.layers)
    own = zip(spec.layers, halves, strict=True)
    layers_ = tuple(replace(layer, feed_forward=half) for layer, half in own)
    return replace(spec, layers=layers_, names=NAMES)


def _attentions(config: ConfigReader) -> list[AttentionSpec]:
    num_layers, interval = config.count("num_hidden_layers"), config.count("no_rope_layer_interval")
    # A 1 stands for a layer that rotates.
    rotates = (config.value("no_rope_layers") and config.numbers("no_rope_layers", num_layers)) or [
        int((layer + 1) % interval != 0) for layer in range(num_layers)
    ]
    kinds = config.layer_types(num_layers, known=("full_attention", CHUNKED)) or [
        CHUNKED if each else "full_attention" for each in rotates
    ]
    chunk = config.count("attention_chunk_size") if CHUNKED in kinds else None
    plain = llama_attention(config, bias=config.flag("attention_bias"), interleaved=True)
    norm = NormSpec(eps=config.number("rms_norm_eps"))
    head_norm = HeadNormSpec(norm=norm, after_rope=True, has_weights=False)
    rotating = replace(plain, head_norm=head_norm if config.flag("use_qk_norm") else None)
    still = replace(plain, rope=None, query_scaling=_query_scaling(config))
    return [
        replace(rotating if each else still, chunk=chunk if kind == CHUNKED else None)
        for each, kind in zip(rotates, kinds, strict=True)
    ]


def _query_scaling(config: ConfigReader) -> QueryScaling | None:
    # Some published configs have 4 in place of true.
    config.check("attn_temperature_tuning", (False, True, 4))
    beta, positions = config.number("attn_scale"), config.count("floor_scale")
    if not config.value("attn_temperature_tuning"):
        return None
    return QueryScaling(beta=beta, positions=positions, offset=1)


def _is_sparse(config: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer has experts: those that `moe_layers` names, or every `interleave_moe_layer_step`-th."""
    step, named = config.count("interleave_moe_layer_step"), config.value("moe_layers")
    if named is None:
        return [(layer + 1) % step == 0 for layer in range(num_layers)]
    if not isinstance(named, list) or not all(isinstance(layer, int) for layer in named):
        raise UnsupportedModel(f"moe_layers={named!r} must be a list of layers")
    return [layer in named for layer in range(num_layers)]


FAMILY = Family(
    model_type="llama4_text",
    classes=("Llama4ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "eos_token_id": 2,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    aliases={"num_experts": "num_local_experts"},
    without_effect=(*OF_TRAINING, "router_jitter_noise"),
)
