"""Falcon-H1: attention and Mamba-2 side by side in every layer, with factors almost everywhere."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader, is_number
from millrace_shard.models.families.bamba import NAMES, OF_MAMBA, step_limits
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.recurrent_spec import GatedNormSpec, Mamba2Spec
from millrace_shard.models.spec import BesideSpec, DecoderSpec, GatedSpec, LayerSpec, NormSpec


def _mamba(config: ConfigReader) -> Mamba2Spec:
    heads, groups = config.count("mamba_n_heads"), config.count("mamba_n_groups")
    inner, width = config.optional_count("mamba_d_ssm"), config.value("mamba_d_head")
    expanded = config.count("mamba_expand") * config.count("hidden_size")
    inner = inner or expanded
    head_dim = inner // heads if width == "auto" else config.count("mamba_d_head")
    if head_dim * heads != inner or heads % groups:
        raise UnsupportedModel(
            f"mamba_n_heads={heads}, mamba_d_head={width!r} and mamba_n_groups={groups}"
            f" do not divide mamba_d_ssm={inner}"
        )
    norm = GatedNormSpec(
        eps=config.number("rms_norm_eps"),
        gate_first=not config.flag("mamba_norm_before_gate"),
        wide=True,
    )
    return Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_dim=config.count("mamba_d_state"),
        kernel=config.count("mamba_d_conv"),
        norm=norm if config.flag("mamba_rms_norm") else None,
        conv_bias=config.flag("mamba_conv_bias"),
        bias=config.flag("mamba_proj_bias"),
        out_bias=config.flag("projectors_bias"),
        limits=step_limits(config),
        multipliers=_factors(config, "ssm_multipliers", 5),
    )


def _factors(config: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    """The numbers of a field, 1 if it is null; they may be negative, as trained factors are."""
    values = config.value(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count or not all(map(is_number, values)):
        raise UnsupportedModel(f"{name}={values!r} must be {count} numbers")
    return tuple(map(float, values))


def _factor(config: ConfigReader, name: str) -> float:
    value = config.value(name)
    if value is not None and not is_number(value):
        raise UnsupportedModel(f"{name}={value!r} must be a number")
    return 1.0 if value is None else float(value)


def _spec(config: ConfigReader) -> DecoderSpec:
    norm = NormSpec(eps=config.number("rms_norm_eps"))
    plain = llama_attention(config, bias=config.flag("attention_bias"))
    of_gate, of_result = _factors(config, "mlp_multipliers", 2)
    layer = LayerSpec(
        # Rotations are linear: what multiplies keys may multiply scores.
        attention=replace(plain, scale=plain.scale * _factor(config, "key_multiplier")),
        recurrent=_mamba(config),
        beside=BesideSpec(
            attention_input=_factor(config, "attention_in_multiplier"),
            attention_result=_factor(config, "attention_out_multiplier"),
            recurrent_input=_factor(config, "ssm_in_multiplier"),
            recurrent_result=_factor(config, "ssm_out_multiplier"),
        ),
        feed_forward=GatedSpec(
            intermediate_size=config.count("intermediate_size"),
            activation=activation(config),
            bias=config.flag("mlp_bias"),
            multipliers=(of_gate, of_result),
        ),
        norm=norm,
    )
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=(layer,) * config.count("num_hidden_layers"),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        embedding_multiplier=_factor(config, "embedding_multiplier"),
        logit_multiplier=_factor(config, "lm_head_multiplier"),
        names=NAMES,
    )


FAMILY = Family(
    model_type="falcon_h1",
    classes=("FalconH1ForCausalLM",),
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
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "eos_token_id": 2,
    },
    without_effect=("num_logits_to_keep", "mamba_chunk_size"),
)
