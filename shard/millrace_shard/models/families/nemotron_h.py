"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, an MLP or experts, none with gates."""

from __future__ import annotations

import math

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import Heads
from millrace_shard.models.families.glm4_moe import grouped_rule
from millrace_shard.models.families.mamba2 import mixer
from millrace_shard.models.recurrent_spec import Mamba2Spec
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    FeedForwardSpec,
    GatedSpec,
    Halves,
    LayerNames,
    LayerSpec,
    NormSpec,
    RouterSpec,
    SharedExpertSpec,
    WeightNames,
)

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""By the letters of `hybrid_override_pattern`."""
_FORMER = {"mamba": "linear_attention", "attention": "full_attention"}


def _expert_names(mixer: str) -> ExpertNames:
    return ExpertNames(
        router=f"{mixer}.gate",
        experts=f"{mixer}.experts",
        up="up_proj",
        shared=f"{mixer}.shared_experts",
        latent_in=f"{mixer}.fc1_latent_proj",
        latent_out=f"{mixer}.fc2_latent_proj",
    )


NAMES = WeightNames(
    layer=LayerNames(
        query="mixer.q_proj",
        key="mixer.k_proj",
        value="mixer.v_proj",
        out="mixer.o_proj",
        up="mixer.up_proj",
        down="mixer.down_proj",
        before_attention="norm",
        before_mlp="norm",
        experts=(_expert_names("mixer"),),
    ),
    layers="backbone.layers",
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
)

MTP_NAMES = LayerNames(
    query="0.mixer.q_proj",
    key="0.mixer.k_proj",
    value="0.mixer.v_proj",
    out="0.mixer.o_proj",
    before_attention="0.norm",
    before_mlp="1.norm",
    experts=(_expert_names("1.mixer"),),
)
"""Of the layers that predict further tokens, of which the first has attention and the second experts."""


def _kinds(config: ConfigReader) -> tuple[str, ...]:
    """The kind of each layer, from a list or from letters."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    values = [config.value(name) for name in names]
    pairs = zip(names, values, strict=True)
    name, value = next((pair for pair in pairs if pair[1]), (names[0], []))
    letters = _KINDS if isinstance(value, str) else {each: each for each in _KINDS.values()}
    each_of = value if isinstance(value, str | list) else ()
    kinds = [letters.get(_FORMER.get(str(each), str(each))) for each in each_of]
    if not kinds or None in kinds:
        known = (*_KINDS, *_KINDS.values())
        raise UnsupportedModel(f"{name}={value!r} must be of {', '.join(known)}, one each layer")
    if "full_attention" not in kinds:
        raise UnsupportedModel(f"{name}={value!r} names no layer with attention")
    count = config.optional_count("num_hidden_layers")
    if count not in (None, len(kinds)):
        raise UnsupportedModel(f"num_hidden_layers={count}, and {name} is of {len(kinds)} layers")
    return tuple(kind for kind in kinds if kind is not None)


def _mamba(config: ConfigReader) -> Mamba2Spec:
    heads, groups = config.count("mamba_num_heads"), config.count("n_groups")
    if heads % groups:
        raise UnsupportedModel(f"n_groups={groups} does not divide mamba_num_heads={heads}")
    config.check("mamba_hidden_act", ("silu",))
    config.check("mamba_proj_bias", (False,))
    sizes = heads, config.count("mamba_head_dim")
    return mixer(config, sizes, groups, state_dim=config.count("ssm_state_size"))


def _attention(config: ConfigReader) -> AttentionSpec:
    heads = Heads(config)
    config.check("attention_bias", (False,))
    config.check("sliding_window", ())
    return AttentionSpec(
        num_heads=heads.count,
        num_kv_heads=heads.kv_count,
        head_dim=heads.dim,
        scale=heads.dim**-0.5,
        rope=None,
    )


def _experts(config: ConfigReader) -> ExpertsSpec:
    config.check("n_shared_experts", (1,))
    if config.flag("mlp_bias"):
        raise UnsupportedModel("mlp_bias=true is not supported for nemotron_h with experts")
    count, activation = config.count("n_routed_experts"), Activation.RELU_SQUARED
    shared = GatedSpec(
        intermediate_size=config.count("moe_shared_expert_intermediate_size"), activation=activation
    )
    return ExpertsSpec(
        router=RouterSpec(num_experts=count, rule=grouped_rule(config, count), correction=True),
        intermediate_size=config.count("moe_intermediate_size"),
        activation=activation,
        shared=SharedExpertSpec(mlp=shared),
        latent_size=config.optional_count("moe_latent_size"),
    )


def _spec(config: ConfigReader) -> DecoderSpec:
    kinds, attention, mamba = _kinds(config), _attention(config), _mamba(config)
    norm = NormSpec(eps=config.number("layer_norm_epsilon"), wide=True)
    config.check("mlp_hidden_act", ("relu2",))
    dense: FeedForwardSpec = GatedSpec(
        intermediate_size=config.count("intermediate_size"),
        activation=Activation.RELU_SQUARED,
        bias=config.flag("mlp_bias"),
    )
    experts = _experts(config) if "moe" in kinds else None
    other = dense if experts is None or "mlp" in kinds else experts
    layers = (
        LayerSpec(
            attention=attention,
            recurrent=mamba if kind == "linear_attention" else None,
            halves=Halves.SECOND if kind in ("mlp", "moe") else Halves.FIRST,
            feed_forward=experts if experts is not None and kind == "moe" else other,
            norm=norm,
        )
        for kind in kinds
    )
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(layers),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        names=NAMES,
    )


FAMILY = Family(
    model_type="nemotron_h",
    classes=("NemotronHForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21_504,
        "mlp_hidden_act": "relu2",
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_limit": (0.0, math.inf),
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 2,
    },
    aliases={
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_limit": "time_step_limit",
        "mamba_conv_bias": "use_conv_bias",
    },
    without_effect=(
        *("num_logits_to_keep", "use_mamba_kernels", "expand", "chunk_size", "time_step_min"),
        *("time_step_max", "time_step_floor", "mamba_ssm_cache_dtype", "hidden_dropout"),
        *("moe_shared_expert_overlap", "residual_in_fp32", "rescale_prenorm_residual"),
        *("num_nextn_predict_layers", "mtp_layers_block_type", "output_router_logits"),
        *("mtp_hybrid_override_pattern", "keep_mtp_spec_in_bf16"),
    ),
)
