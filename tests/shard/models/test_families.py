"""The specs of the families, and that each page knows the fields of its class in transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import GENERAL
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.load import uses_plain_torch
from millrace_shard.models.rope import RopeOverride, override_spec
from millrace_shard.models.rope_spec import RopeSpec
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    GatedSpec,
    LayerSpec,
    NormSpec,
)
from millrace_shard.models.split import check_split, kv_heads_per_rank
from millrace_testing.models.models import CONFIGS

WITHOUT_EFFECT = {
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "use_cache",
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}

NESTED = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "granite", "exaone4"),
    *("gemma2", "gemma3_text", "gemma4_text", "llama4_text", "cohere2"),
)
"""Families in multimodal classes: a `text_config` lacks whatever the class in transformers has by default."""


def spec(model_type: str = "llama", **overrides: Any) -> DecoderSpec:
    config = AutoConfig.for_model(model_type, **(CONFIGS[model_type] | overrides))
    return FAMILIES[model_type].read(config.to_dict())


def test_llama_configs_are_read_in_full() -> None:
    norm = NormSpec(eps=1e-3)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=4,
            num_kv_heads=2,
            head_dim=20,
            scale=20**-0.5,
            rope=RopeSpec(rotary_dim=20, theta=10_000.0, max_positions=256),
        ),
        feed_forward=GatedSpec(intermediate_size=80),
        norm=norm,
    )
    assert spec(head_dim=20, rms_norm_eps=1e-3) == DecoderSpec(
        vocab_size=199, hidden_size=64, layers=(layer, layer), norm=norm, max_positions=256
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_page_reads_every_field_of_its_class_and_has_its_defaults(model_type: str) -> None:
    family = FAMILIES[model_type]
    defaults = {**GENERAL, **family.defaults}
    theirs = CONFIG_MAPPING[model_type]
    whole = theirs(**CONFIGS[model_type]).to_dict()
    reader = ConfigReader(whole, defaults)
    family.spec(reader)
    of_page = reader.fields_read()
    reader.refuse_unread()
    general = {field.name for field in dataclasses.fields(PretrainedConfig)}
    own = {field.name: field.default for field in dataclasses.fields(theirs)}
    known = reader.fields_read() | WITHOUT_EFFECT | set(family.without_effect) | {"head_dim"}
    assert own.keys() - general - known == set()
    for name, value in own.items():
        is_read = name in of_page and (model_type in NESTED or name not in CONFIGS[model_type])
        if (is_read and value) or name == "eos_token_id":
            assert defaults.get(name) == value, name


@pytest.mark.parametrize(
    ("model_type", "overrides", "biases"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {}, (False, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_follow_the_config(
    model_type: str, overrides: dict[str, Any], biases: tuple[bool, ...]
) -> None:
    layer = spec(model_type, **overrides).layers[0]
    attention = layer.attention
    assert (attention.qkv_bias, attention.out_bias, layer.feed_forward.bias) == biases


@pytest.mark.parametrize(
    ("model_type", "overrides", "windows"),
    [
        ("mistral", {"sliding_window": 9}, (9, 9)),
        ("mistral", {}, (None, None)),
        ("qwen2", {"sliding_window": 9}, (None, None)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            (None, 9),
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
            (9, 9),
        ),
    ],
)
def test_windows_follow_the_config(
    model_type: str, overrides: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    result = spec(model_type, **overrides)
    assert tuple(layer.attention.window for layer in result.layers) == windows


@pytest.mark.parametrize(
    ("model_type", "overrides", "field"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("llama", {"logit_scale": 0.1}, "logit_scale=0.1"),
        (
            "llama",
            {"num_attention_heads": 8, "num_key_value_heads": 3},
            "num_key_value_heads=3",
        ),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        (
            "llama",
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "rope_type 'prop",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 of 8 experts"),
        ("mixtral", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("glm4_moe", {"n_group": 3}, "n_group=3 of 8 experts"),
        ("glm4_moe", {"n_group": 8}, "n_group=8 of 8 experts"),
        ("glm4_moe", {"topk_group": 3}, "topk_group=3 of 2 groups"),
        ("glm4_moe", {"n_group": 4, "num_experts_per_tok": 4}, "has not 4 experts"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit=0.0"),
        ("llama", {"rope_parameters": HALF}, "partial_rotary_factor=0.5 is not supported for lla"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention="),
        ("gemma4_text", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input=9"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True"),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k=9 of 8 experts"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min=0.5"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size=0"),
        ("gptj", {"rotary_dim": 9}, "rotary_dim=9 of heads of 16"),
        ("gptj", {"activation_function": "relu"}, "activation_function='relu'"),
        ("falcon", {"alibi": True}, "alibi=True is not supported for falcon: its class rounds"),
        ("falcon", {"num_kv_heads": 3}, "num_kv_heads=3 does not divide 4 heads"),
        ("bloom", {"seq_length": 65_536}, "ALiBi of 65536 positions"),
        ("bloom", {"slow_but_exact": True}, "slow_but_exact=True"),
        ("mpt", {"no_bias": False}, "no_bias=False"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi=False"),
        ("dbrx", {"ffn_config": {"moe_top_k": 9}}, "moe_top_k=9 of 4 experts"),
        ("dbrx", {"attn_config": {"kv_n_heads": 3}}, "kv_n_heads=3 do not divide"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok of phimoe must be 2"),
        ("gemma3_text", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping=3.0"),
        ("hunyuan_v1_dense", {"rope_parameters": ALPHA | {"alpha": [1]}}, "alpha=[1]"),
        ("hunyuan_v1_dense", {"rope_parameters": ALPHA | {"alpha": -3}}, "alpha=-3"),
        ("hunyuan_v1_dense", {"rope_parameters": ALPHA, "head_dim": 2}, "of 2 channels"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention", "full_attention"]},
            "sliding_window is off",
        ),
    ],
)
def test_fields_that_cannot_be_computed_are_refused_by_name(
    model_type: str, overrides: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        spec(model_type, **overrides)
    assert field in str(refusal.value)


def test_other_names_of_fields_are_read_and_must_not_contradict() -> None:
    raw = AutoConfig.for_model("qwen3_moe", **CONFIGS["qwen3_moe"]).to_dict()
    count = raw.pop("num_local_experts", None) or raw.pop("num_experts")
    for name in ("num_experts", "num_local_experts"):
        layer = FAMILIES["qwen3_moe"].read(raw | {name: count}).layers[0]
        assert isinstance(layer.feed_forward, ExpertsSpec)
        assert layer.feed_forward.router.num_experts == 8
    with pytest.raises(UnsupportedModel, match="num_local_experts=8 contradicts num_experts=9"):
        FAMILIES["qwen3_moe"].read(raw | {"num_local_experts": 8, "num_experts": 9})


def test_layers_have_experts_where_the_config_puts_them() -> None:
    def sparse(model_type: str, **overrides: Any) -> list[bool]:
        layers = spec(model_type, num_hidden_layers=5, **overrides).layers
        return [isinstance(layer.feed_forward, ExpertsSpec) for layer in layers]

    assert sparse("mixtral") == [True] * 5
    assert sparse("olmoe") == [True] * 5
    assert sparse("glm4_moe", first_k_dense_replace=2) == [False, False, True, True, True]
    assert sparse("qwen2_moe", mlp_only_layers=[1, 3]) == [True, False, True, False, True]
    assert sparse("qwen3_moe", decoder_sparse_step=2) == [False, True, False, True, False]
    raw = AutoConfig.for_model("qwen3_moe", **CONFIGS["qwen3_moe"]).to_dict()
    with pytest.raises(UnsupportedModel, match="mlp_only_layers='0'"):
        FAMILIES["qwen3_moe"].read(raw | {"mlp_only_layers": "0"})


def test_unknown_layer_types_are_refused() -> None:
    raw = AutoConfig.for_model("qwen3", **CONFIGS["qwen3"]).to_dict()
    for kinds in (["full_attention", "linear_attention"], ["full_attention"], "full_attention"):
        with pytest.raises(UnsupportedModel, match="layer_types="):
            FAMILIES["qwen3"].read(raw | {"layer_types": kinds})
    with pytest.raises(UnsupportedModel, match=r"layer_types=\[\[\]\]"):
        FAMILIES["qwen3_moe"].read(raw | {"model_type": "qwen3_moe", "layer_types": [[]]})


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_dropout": 0.3},
        {"initializer_range": 0.5, "use_cache": False},
        {"hidden_act": "silu", "pretraining_tp": 1, "rope_interleaved": False},
        {"architectures": ["LlamaForCausalLM"]},
        {"unsloth_version": "2026.1", "is_llama_config": True},
    ],
)
def test_config_fields_that_change_nothing_are_accepted(overrides: dict[str, Any]) -> None:
    assert spec(**overrides) == spec()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_possible_splits_are_accepted(world_size: int) -> None:
    result = spec()
    check_split(result, world_size)
    attention = result.layers[0].attention
    assert kv_heads_per_rank(attention, world_size) == {1: 2, 2: 1, 4: 1}[world_size]


@pytest.mark.parametrize(
    ("overrides", "world_size", "possible"),
    [
        ({}, 3, "1, 2, 4"),
        ({}, 8, "1, 2, 4"),
        (
            {
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "hidden_size": 72,
                "intermediate_size": 90,
            },
            2,
            "1, 3, 9",
        ),
        ({"intermediate_size": 81}, 2, "1"),
        (
            {
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "hidden_size": 96,
                "intermediate_size": 96,
            },
            6,
            "1, 2, 4, 12",
        ),
    ],
)
def test_impossible_splits_name_the_possible_ones(
    overrides: dict[str, Any], world_size: int, possible: str
) -> None:
    result = spec(**overrides)
    with pytest.raises(UnsupportedModel) as refusal:
        check_split(result, world_size)
    assert str(refusal.value).endswith(f"these numbers of shards work: {possible}")


def test_exactly_the_listed_families_have_operators() -> None:
    have_operators = {name for name in FAMILIES if not uses_plain_torch(spec(name))}
    assert have_operators == {
        *("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "seed_oss"),
        *("mixtral", "qwen3_moe", "glm4_moe", "granitemoe"),
    }


def test_sizes_of_full_layers_of_gemma4_are_read_from_both_forms() -> None:
    raw = AutoConfig.for_model("gemma4_text", **CONFIGS["gemma4_text"]).to_dict()
    published = {name: value for name, value in raw.items() if name != "per_layer_config"}
    published |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    family = FAMILIES["gemma4_text"]
    assert family.read(published) == family.read(raw)
    sizes = [(each.head_dim, each.num_kv_heads) for each in family.read(raw).attentions]
    assert sizes == [(16, 2), (32, 1)] * 2
    with pytest.raises(UnsupportedModel, match="per_layer_config="):
        family.read(raw | {"per_layer_config": {"1": {"num_attention_heads": 9}}})


def test_rotations_of_a_share_of_frequencies_are_not_scaled_by_a_flag() -> None:
    with pytest.raises(UnsupportedModel, match="'linear' is not supported where rope_type is 'pro"):
        override_spec(spec("gemma4_text"), RopeOverride("linear", 2.0))


def test_published_mixtures_have_older_forms_of_fields() -> None:
    """As MiniMax M2 and Hunyuan A13B are published."""
    raw = AutoConfig.for_model("minimax_m2", **CONFIGS["minimax_m2"]).to_dict()
    raw |= {"rope_parameters": None, "rope_theta": 1e4, "rotary_dim": 8, "use_routing_bias": True}
    rope = FAMILIES["minimax_m2"].read(raw).layers[0].attention.rope
    assert rope is not None
    assert (rope.rotary_dim, rope.theta) == (8, 1e4)
    with pytest.raises(UnsupportedModel, match="rotary_dim=18 of heads of 16"):
        FAMILIES["minimax_m2"].read(raw | {"rotary_dim": 18})
    raw = AutoConfig.for_model("hunyuan_v1_moe", **CONFIGS["hunyuan_v1_moe"]).to_dict()
    for_all = {"moe_topk": [2, 2, 2], "num_shared_expert": [1, 1, 1], "use_cla": False}
    family = FAMILIES["hunyuan_v1_moe"]
    assert family.read(raw | for_all | {"moe_intermediate_size": [24] * 3}) == family.read(raw)
    for name, value in (("moe_topk", [1, 2, 1]), ("moe_topk", 9), ("num_shared_expert", 2)):
        with pytest.raises(UnsupportedModel, match=f"{name}="):
            family.read(raw | {name: value})
