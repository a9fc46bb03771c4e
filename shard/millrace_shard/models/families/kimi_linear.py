"""Kimi Linear: three of four layers are Kimi Delta Attention, the others attention over latents without positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.deepseek_v3 import (
    DERIVED,
    shared_mixture,
    sparse_after,
    unrotated_latents,
)
from millrace_shard.models.families.expert_fields import OF_TRAINING, mixture_decoder
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.glm4_moe import grouped_rule
from millrace_shard.models.families.glm4_moe_lite import is_sparse_by_kind
from millrace_shard.models.recurrent_spec import KimiDeltaSpec
from millrace_shard.models.spec import (
    DecoderSpec,
    ExpertNames,
    LayerNames,
    RouterSpec,
    WeightNames,
)

WRITTEN = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names in files, and what the class calls the same."""
KINDS = ("linear_attention", "full_attention")
_EXPERTS = "block_sparse_moe"
NAMES = WeightNames(
    layer=LayerNames(
        experts=(
            ExpertNames(
                router=f"{_EXPERTS}.gate",
                experts=f"{_EXPERTS}.experts",
                gate="w1",
                up="w3",
                down="w2",
                shared=f"{_EXPERTS}.shared_experts",
            ),
            ExpertNames(shared="mlp.shared_experts"),
        )
    )
)


def _linear(config: ConfigReader) -> dict[str, Any]:
    """The fields of Kimi Delta Attention by name, which published files have in an object."""
    value = config.value("linear_attn_config")
    if value is not None and not isinstance(value, dict):
        raise UnsupportedModel(f"linear_attn_config={value!r} must be an object")
    return value or {}


def _kinds(config: ConfigReader, linear: dict[str, Any]) -> tuple[str, ...]:
    """The kind of each layer, from `layer_types` or from lists of numbers from 1 on."""
    count = config.count("num_hidden_layers")
    kinds = config.layer_types(count, KINDS)
    names = ("kda_layers", "full_attn_layers")
    if kinds is None and all(name in linear for name in names):
        lists = [linear[name] for name in names]
        numbers = [each for one in lists if isinstance(one, list) for each in one]
        if sorted(map(str, numbers)) != sorted(map(str, range(1, count + 1))):
            raise UnsupportedModel(
                f"kda_layers and full_attn_layers must name each of {count} layers once, from 1 on"
            )
        kinds = tuple(KINDS[number in lists[1]] for number in range(1, count + 1))
    if kinds is None:
        kinds = tuple(KINDS[layer > 0 and layer % 4 == 0] for layer in range(count))
    if "full_attention" not in kinds:
        raise UnsupportedModel("layer_types has no layer with full_attention")
    return kinds


def _spec(config: ConfigReader) -> DecoderSpec:
    written = {name: config.value(alias) for alias, name in WRITTEN.items() if config.has(alias)}
    if written.get("norm_topk_prob", True) is None:
        # As in the class.
        written["norm_topk_prob"] = False
    config = config.with_fields(
        **{name: each for name, each in written.items() if each is not None}
    )
    linear = _linear(config)
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    # Whatever the file has outside of the object.
    sizes = config.with_fields(**{names[name]: linear[name] for name in names if name in linear})
    recurrent = KimiDeltaSpec(
        num_heads=sizes.count("linear_num_heads"),
        head_dim=sizes.count("linear_head_dim"),
        kernel=sizes.count("linear_conv_kernel_dim"),
        eps=config.number("rms_norm_eps"),
    )
    config.check("moe_router_activation_func", ("sigmoid",))
    config.check("mla_use_nope", (True,))
    count = config.count("num_local_experts")
    router = RouterSpec(num_experts=count, rule=grouped_rule(config, count), correction=True)
    by_kind = config.value("mlp_layer_types") is not None
    is_sparse = is_sparse_by_kind(config) if by_kind else sparse_after(config)
    attention, kinds = unrotated_latents(config), _kinds(config, linear)
    experts = shared_mixture(config, router)
    spec = mixture_decoder(config, [attention] * len(kinds), experts, is_sparse)
    layers = (
        replace(layer, recurrent=recurrent if kind == "linear_attention" else None)
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, names=NAMES, layers=tuple(layers))


FAMILY = Family(
    model_type="kimi_linear",
    classes=("KimiLinearForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "n_shared_experts": 1,
        "num_local_experts": 256,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "eos_token_id": 163_586,
    },
    aliases=WRITTEN,
    without_effect=(*OF_TRAINING, *DERIVED),
)
