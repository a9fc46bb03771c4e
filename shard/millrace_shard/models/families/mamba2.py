"""Mamba-2: recurrent layers only, without attention and feed-forward halves."""

from __future__ import annotations

import math

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.bamba import step_limits
from millrace_shard.models.families.family import Family
from millrace_shard.models.recurrent_spec import GatedNormSpec, Mamba1Spec, Mamba2Spec
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedSpec,
    Halves,
    LayerNames,
    LayerSpec,
    NormSpec,
    WeightNames,
)

NAMES = WeightNames(
    layer=LayerNames(before_attention="norm", before_mlp=None),
    layers="backbone.layers",
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
)

LEAST_WIDTH = 8
"""Channels of heads that no layer has, but every kernel takes."""


def _mamba(config: ConfigReader) -> Mamba2Spec:
    heads, groups, head_dim = (config.count(name) for name in ("num_heads", "n_groups", "head_dim"))
    inner = config.count("expand") * config.count("hidden_size")
    if heads * head_dim != inner or heads % groups:
        raise UnsupportedModel(
            f"num_heads={heads}, head_dim={head_dim} and n_groups={groups}"
            f" do not divide the {inner} channels of a layer"
        )
    config.check("hidden_act", ("silu",))
    return mixer(config, (heads, head_dim), groups, state_dim=config.count("state_size"))


def mixer(
    config: ConfigReader, heads: tuple[int, int], num_groups: int, *, state_dim: int
) -> Mamba2Spec:
    """The layer of classes that call it `mixer`, with the number and the size of `heads`."""
    bias = config.flag("use_bias")
    return Mamba2Spec(
        num_heads=heads[0],
        head_dim=heads[1],
        num_groups=num_groups,
        state_dim=state_dim,
        kernel=config.count("conv_kernel"),
        norm=GatedNormSpec(eps=config.number("layer_norm_epsilon")),
        conv_bias=config.flag("use_conv_bias"),
        bias=bias,
        out_bias=bias,
        limits=step_limits(config),
        module="mixer",
    )


def _spec(config: ConfigReader) -> DecoderSpec:
    return recurrent_decoder(config, _mamba(config))


def recurrent_decoder(config: ConfigReader, mamba: Mamba2Spec | Mamba1Spec) -> DecoderSpec:
    """A decoder of layers that have nothing else."""
    norm = NormSpec(eps=config.number("layer_norm_epsilon"))
    units = mamba.num_heads if isinstance(mamba, Mamba2Spec) else mamba.channels
    # Neither is computed, and both have the sizes by which ranks share heads.
    attention = AttentionSpec(
        num_heads=units,
        num_kv_heads=units,
        head_dim=LEAST_WIDTH,
        scale=1.0,
        rope=None,
    )
    layer = LayerSpec(
        attention=attention,
        recurrent=mamba,
        halves=Halves.FIRST,
        feed_forward=GatedSpec(intermediate_size=units),
        norm=norm,
    )
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=(layer,) * config.count("num_hidden_layers"),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        names=NAMES,
    )


FAMILY = Family(
    model_type="mamba2",
    classes=("Mamba2ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": (0.0, math.inf),
        "eos_token_id": 2,
        # The class lacks the field, and a server needs it.
        "max_position_embeddings": 32_768,
    },
    without_effect=(
        *("chunk_size", "rescale_prenorm_residual", "residual_in_fp32", "time_step_rank"),
        *("time_step_floor", "time_step_max", "time_step_min"),
    ),
)
