"""Bamba: Mamba-2 layers, and some layers with attention."""

from __future__ import annotations

import math
from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader, is_number
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.recurrent_spec import GatedNormSpec, Mamba2Spec
from millrace_shard.models.spec import DecoderSpec, LayerNames, WeightNames

NAMES = WeightNames(
    layer=LayerNames(
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        before_mlp="pre_ff_layernorm",
    ),
    norm="model.final_layernorm",
)


def mamba2_spec(config: ConfigReader) -> Mamba2Spec:
    """A Mamba-2 layer by the fields that Bamba and Granite 4 have."""
    heads, groups = config.count("mamba_n_heads"), config.count("mamba_n_groups")
    inner = config.count("mamba_expand") * config.count("hidden_size")
    width = config.value("mamba_d_head")
    head_dim = inner // heads if width == "auto" else config.count("mamba_d_head")
    if head_dim * heads != inner or heads % groups:
        raise UnsupportedModel(
            f"mamba_n_heads={heads}, mamba_d_head={width!r} and mamba_n_groups={groups}"
            f" do not divide the {inner} channels of a layer"
        )
    return Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_dim=config.count("mamba_d_state"),
        kernel=config.count("mamba_d_conv"),
        norm=GatedNormSpec(eps=config.number("rms_norm_eps")),
        conv_bias=config.flag("mamba_conv_bias"),
        bias=config.flag("mamba_proj_bias"),
        out_bias=config.flag("mamba_proj_bias"),
        limits=step_limits(config),
    )


def step_limits(config: ConfigReader) -> tuple[float, float]:
    """The bounds of step sizes; an infinite one may be an object."""
    value = config.value("time_step_limit") or [0.0, math.inf]
    bounds = [
        math.inf if isinstance(each, dict) and set(each) == {"__float__"} else each
        for each in (value if isinstance(value, list | tuple) else [])
    ]
    if len(bounds) != 2 or not all(is_number(each) or each == math.inf for each in bounds):
        raise UnsupportedModel(f"time_step_limit={value!r} must be two numbers")
    return float(bounds[0]), float(bounds[1])


def _spec(config: ConfigReader) -> DecoderSpec:
    num_layers, indexes = config.count("num_hidden_layers"), config.value("attn_layer_indices")
    if not isinstance(indexes, list) or not set(indexes) & set(range(num_layers)):
        raise UnsupportedModel(f"attn_layer_indices={indexes!r} names no layer with attention")
    attention = llama_attention(config, bias=config.flag("attention_bias"), may_be_partial=True)
    spec = llama_decoder(config, [attention] * num_layers, mlp_bias=config.flag("mlp_bias"))
    mamba = mamba2_spec(config)
    layers = (
        layer if index in indexes else replace(layer, recurrent=mamba)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers), names=NAMES)


OF_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "time_step_limit": (0.0, math.inf),
}
"""Defaults of this class in transformers and of Granite 4's."""
FAMILY = Family(
    model_type="bamba",
    classes=("BambaForCausalLM",),
    spec=_spec,
    defaults=OF_MAMBA
    | {
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "partial_rotary_factor": 0.5,
        "eos_token_id": 2,
    },
    without_effect=("num_logits_to_keep", "z_loss_coefficient", "mamba_chunk_size"),
)
