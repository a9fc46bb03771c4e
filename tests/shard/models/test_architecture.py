from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.architecture import Architecture
from millrace_testing.models.models import CONFIGS


def config(model_type: str = "llama", **overrides: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **(CONFIGS[model_type] | overrides))


def architecture(model_type: str = "llama", **overrides: Any) -> Architecture:
    return Architecture.from_config(config(model_type, **overrides))


def test_llama() -> None:
    assert architecture(head_dim=20, rms_norm_eps=1e-3) == Architecture(
        model_type="llama",
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=20,
        intermediate_size=80,
        num_layers=2,
        vocab_size=199,
        norm_eps=1e-3,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None, None),
        tied_head=False,
    )


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
def test_biases(model_type: str, overrides: dict[str, Any], biases: tuple[bool, ...]) -> None:
    arch = architecture(model_type, **overrides)
    assert (arch.qkv_bias, arch.out_bias, arch.mlp_bias) == biases


@pytest.mark.parametrize(
    ("model_type", "overrides", "windows", "window"),
    [
        ("mistral", {"sliding_window": 9}, (9, 9), 9),
        ("mistral", {}, (None, None), None),
        ("qwen2", {"sliding_window": 9}, (None, None), None),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            (None, 9),
            None,
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
            (9, 9),
            9,
        ),
    ],
)
def test_windows(
    model_type: str, overrides: dict[str, Any], windows: tuple[int | None, ...], window: int | None
) -> None:
    arch = architecture(model_type, **overrides)
    assert arch.windows == windows
    assert arch.window == window


@pytest.mark.parametrize(
    ("model_type", "overrides", "field"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config",
        ),
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
        (
            "qwen2",
            {"layer_types": ["sliding_attention", "full_attention"]},
            "sliding_window is off",
        ),
        ("gemma2", {}, "model_type 'gemma2'"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    model_type: str, overrides: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        architecture(model_type, **overrides)
    assert field in str(refusal.value)


def test_unknown_layer_types_are_refused() -> None:
    odd = config("qwen3")
    odd.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModel, match="layer_types="):
        Architecture.from_config(odd)
    odd.layer_types = ["full_attention"]
    with pytest.raises(UnsupportedModel, match="layer_types="):
        Architecture.from_config(odd)


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
def test_what_changes_nothing_is_accepted(overrides: dict[str, Any]) -> None:
    assert architecture(**overrides) == architecture()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_possible_splits(world_size: int) -> None:
    arch = architecture()
    arch.check_split(world_size)
    assert arch.kv_heads_per_rank(world_size) == {1: 2, 2: 1, 4: 1}[world_size]


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
    arch = architecture(**overrides)
    with pytest.raises(UnsupportedModel) as refusal:
        arch.check_split(world_size)
    assert str(refusal.value).endswith(f"these numbers of shards work: {possible}")
