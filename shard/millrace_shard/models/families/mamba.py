"""Mamba: recurrent layers only, with a state for each channel; Falcon Mamba is the same with norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.mamba2 import recurrent_decoder
from millrace_shard.models.recurrent_spec import Mamba1Spec
from millrace_shard.models.spec import DecoderSpec


def mixer(config: ConfigReader) -> Mamba1Spec:
    """The layer, without norms."""
    hidden, rank = config.count("hidden_size"), config.value("time_step_rank")
    config.check("hidden_act", ("silu",))
    channels = config.count("expand") * hidden
    config.check("intermediate_size", (channels,))
    return Mamba1Spec(
        channels=channels,
        state_dim=config.count("state_size"),
        rank=-(-hidden // 16) if rank == "auto" else config.count("time_step_rank"),
        kernel=config.count("conv_kernel"),
        conv_bias=config.flag("use_conv_bias"),
        bias=config.flag("use_bias"),
        norm_eps=None,
    )


def _spec(config: ConfigReader) -> DecoderSpec:
    return recurrent_decoder(config, mixer(config))


def _falcon(config: ConfigReader) -> DecoderSpec:
    return recurrent_decoder(
        config, replace(mixer(config), norm_eps=config.number("mixer_rms_eps"))
    )


OF_CLASS: Mapping[str, Any] = {
    "vocab_size": 50_280,
    "hidden_size": 768,
    "state_size": 16,
    "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    # The class lacks the field, and a server needs it.
    "max_position_embeddings": 32_768,
}
WITHOUT_EFFECT = (
    *("residual_in_fp32", "rescale_prenorm_residual", "time_step_scale", "time_step_min"),
    *("time_step_max", "time_step_init_scheme", "time_step_floor", "use_mambapy"),
    *("use_associative_scan", "use_falcon_mambapy"),
)

FAMILY = Family(
    model_type="mamba",
    classes=("MambaForCausalLM",),
    spec=_spec,
    defaults=OF_CLASS,
    without_effect=WITHOUT_EFFECT,
)
FALCON = Family(
    model_type="falcon_mamba",
    classes=("FalconMambaForCausalLM",),
    spec=_falcon,
    defaults={**OF_CLASS, "mixer_rms_eps": 1e-6},
    without_effect=WITHOUT_EFFECT,
)
