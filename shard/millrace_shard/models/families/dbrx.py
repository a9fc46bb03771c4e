"""DBRX: LayerNorms, clipped projections, and experts whose weights are one after the other in three tensors."""

from __future__ import annotations

from typing import Any

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader, is_number, read_rope
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    LayerNames,
    LayerSpec,
    NormSpec,
    RouterSpec,
    WeightNames,
)

HALF = "norm_attn_norm"
NAMES = WeightNames(
    layer=LayerNames(
        qkv=f"{HALF}.attn.Wqkv",
        out=f"{HALF}.attn.out_proj",
        before_attention=f"{HALF}.norm_1",
        before_mlp=f"{HALF}.norm_2",
        experts=(
            ExpertNames(
                router="ffn.router.layer",
                experts="ffn.experts.mlp",
                gate="w1",
                up="v1",
                down="w2",
                in_a_row=True,
            ),
        ),
    ),
    layers="transformer.blocks",
    embedding="transformer.wte",
    norm="transformer.norm_f",
)


def _spec(config: ConfigReader) -> DecoderSpec:
    # The class has no field for it.
    norm = NormSpec(eps=1e-5, centred=True, wide=True)
    attention, experts = _attention(config), _experts(config)
    layer = LayerSpec(attention=attention, feed_forward=experts, norm=norm)
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("d_model"),
        layers=(layer,) * config.count("n_layers"),
        norm=norm,
        max_positions=config.count("max_seq_len"),
        tied_head=config.flag("tie_word_embeddings"),
        names=NAMES,
    )


def _attention(config: ConfigReader) -> AttentionSpec:
    own = _part(config, "attn_config", {"kv_n_heads": 1})
    heads, kv_heads, width = (
        config.count("n_heads"),
        own.count("kv_n_heads"),
        config.count("d_model"),
    )
    if width % heads or heads % kv_heads:
        raise UnsupportedModel(
            f"n_heads={heads} and kv_n_heads={kv_heads} do not divide d_model={width} and each other"
        )
    theta = own.value("rope_theta") or config.value("rope_theta")
    lengths = {"max_position_embeddings": config.count("max_seq_len"), "rope_theta": theta}
    rope_config = ConfigReader(
        {"model_type": "dbrx", "rope_parameters": config.value("rope_parameters")}, lengths
    )
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        scale=(width // heads) ** -0.5,
        rope=read_rope(rope_config, head_dim=width // heads),
        clip=own.optional_number("clip_qkv"),
    )


def _experts(config: ConfigReader) -> ExpertsSpec:
    defaults = {"moe_num_experts": 4, "moe_top_k": 1, "ffn_hidden_size": 3584}
    own = _part(config, "ffn_config", {**defaults, "moe_normalize_expert_weights": 1.0})
    count, top_k = own.count("moe_num_experts"), own.count("moe_top_k")
    if top_k > count:
        raise UnsupportedModel(f"moe_top_k={top_k} of {count} experts")
    norm = own.value("moe_normalize_expert_weights")
    if norm is not None and not (is_number(norm) and norm == 1):
        raise UnsupportedModel(f"moe_normalize_expert_weights={norm!r} is not supported, only 1")
    act = own.value("ffn_act_fn") or {}
    if not isinstance(act, dict):
        raise UnsupportedModel(f"ffn_act_fn={act!r} must be an object with a name")
    gate = ConfigReader(act, {"name": "silu", "model_type": "dbrx"})
    rule = RoutingRule(top_k=top_k, scoring=Scoring.SOFTMAX, renormalise=norm is not None)
    return ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=rule),
        intermediate_size=own.count("ffn_hidden_size"),
        activation=activation(gate, "name"),
    )


def _part(config: ConfigReader, name: str, defaults: dict[str, Any]) -> ConfigReader:
    """A nested object."""
    fields = config.value(name) or {}
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"{name}={fields!r} must be an object")
    return ConfigReader(fields, {**defaults, "model_type": "dbrx"})


FAMILY = Family(
    model_type="dbrx",
    classes=("DbrxForCausalLM",),
    spec=_spec,
    defaults={
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "max_seq_len": 2048,
        "vocab_size": 32_000,
    },
    aliases={
        "hidden_size": "d_model",
        "max_position_embeddings": "max_seq_len",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    without_effect=("emb_pdrop", "resid_pdrop", "output_router_logits"),
)
