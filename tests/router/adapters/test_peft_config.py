"""Fields of `adapter_config.json`: PEFT's own list, PEFT's own rule for patterns, and refusals of the rest."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel
from peft.utils.other import get_pattern_key

from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.adapters.fetching.peft_config import (
    APPLIED,
    REFUSED,
    WITHOUT_EFFECT,
    PeftConfig,
)
from millrace_router.adapters.fetching.source_files import CONFIG_FILE


def parse(**fields: Any) -> PeftConfig:
    return PeftConfig.parse(json.dumps({"peft_type": "LORA"} | fields).encode())


def written_by_peft(**fields: Any) -> dict[str, Any]:
    config: dict[str, Any] = LoraConfig(**fields).to_dict()
    return config | {"peft_type": "LORA", "target_modules": sorted(config["target_modules"])}


def test_every_field_of_peft_is_known_by_name() -> None:
    # PEFT does not save its run-time settings.
    theirs = {field.name for field in dataclasses.fields(LoraConfig)} - {"runtime_config"}
    assert theirs <= APPLIED | WITHOUT_EFFECT | REFUSED.keys()
    assert not APPLIED & WITHOUT_EFFECT
    assert not (APPLIED | WITHOUT_EFFECT) & REFUSED.keys()


def test_settings_that_peft_writes_by_itself_are_accepted() -> None:
    config = parse(**written_by_peft(r=3, lora_alpha=12, target_modules=["a"]))
    assert (config.rank_of("x.a"), config.scale_of("x.a")) == (3, 4.0)
    assert config.target_names == ("a",)
    assert parse() == PeftConfig(rank=8, alpha=8.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"task_type": "CAUSAL_LM"},
        {"task_type": None},
        {"task_type": "FEATURE_EXTRACTION"},
        {"task_type": "SEQ_2_SEQ_LM"},
        {"bias": "none"},
        *({"init_lora_weights": how} for how in (True, False, None)),
        *({"init_lora_weights": how} for how in ("gaussian", "eva", "orthogonal", "mica")),
        {"fan_in_fan_out": True, "lora_dropout": 0.1, "inference_mode": True},
        {"base_model_name_or_path": "no/such", "revision": "x", "peft_version": "99"},
        {"layers_to_transform": [1], "layers_pattern": "layers", "exclude_modules": ["x"]},
        {"loftq_config": {"x": 1}, "eva_config": {"x": 1}, "corda_config": {"x": 1}},
        {"lora_ga_config": {"x": 1}, "auto_mapping": {"x": 1}},
        {"megatron_core": "megatron.core", "qalora_group_size": 16},
        {"target_modules": "all-linear"},
        {"from_the_future": None, "and_another": False, "more": [], "yet": {}, "last": ""},
        {"modules_to_save": [], "use_dora": False, "use_bdlora": None},
    ],
    ids=str,
)
def test_peft_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert parse(**fields) == PeftConfig(rank=8, alpha=8.0)


@pytest.mark.parametrize("fields", [{}, {"r": 8}, {"peft_type": None, "r": 8}], ids=str)
def test_a_file_without_a_method_is_refused_as_by_peft(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps(fields))
    with pytest.raises((KeyError, TypeError)):
        PeftModel.from_pretrained(torch.nn.Linear(1, 1), tmp_path)
    with pytest.raises(Invalid, match="field peft_type of"):
        PeftConfig.parse(json.dumps(fields).encode())


RANKS: list[Any] = [0, -1, 1.5, True, "8", None, 1 << 20]
ALPHAS: list[Any] = ["1", None, True, [], 1e10, 10**400]
FLAGS: list[Any] = [1, "true", []]
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type of adapter_config.json, 'LOHA', is another method"),
    ({"peft_type": 5}, "peft_type"),
    ({"task_type": "SEQ_CLS"}, "task_type of adapter_config.json, 'SEQ_CLS', is another task"),
    ({"bias": "all"}, "bias of adapter_config.json, 'all', replaces biases"),
    ({"bias": ["none"]}, "bias"),
    ({"modules_to_save": ["lm_head", "x\n"]}, r"modules_to_save ('lm_head', 'x\n') of"),
    ({"use_dora": True}, "use_dora of adapter_config.json is set: DoRA"),
    *(
        ({"init_lora_weights": how}, f"init_lora_weights of adapter_config.json, '{how}'")
        for how in ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq", "new")
    ),
    ({"init_lora_weights": ["pissa"]}, "init_lora_weights"),
    ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"ensure_weight_tying": True}, "ensure_weight_tying"),
    ({"target_parameters": ["experts"]}, "target_parameters"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"use_qalora": True}, "use_qalora"),
    ({"arrow_config": {"x": 1}}, "arrow_config"),
    ({"kasa_config": {"x": 1}}, "kasa_config"),
    ({"monteclora_config": {"x": 1}}, "monteclora_config"),
    ({"velora_config": {"x": 1}}, "velora_config"),
    ({"megatron_config": {"x": 1}}, "megatron_config"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"of the\nfuture": 0}, r"'of the\nfuture' of adapter_config.json is not known"),
    ({"scale_twice": True}, "'scale_twice' of adapter_config.json is not known"),
    *(({"r": r}, "field r of") for r in RANKS),
    *(({"lora_alpha": alpha}, "lora_alpha") for alpha in ALPHAS),
    *(({"use_rslora": flag}, "use_rslora") for flag in FLAGS),
    ({"lora_bias": 1}, "lora_bias"),
    ({"target_modules": [1]}, "target_modules"),
    ({"target_modules": {"a": 1}}, "target_modules"),
    ({"rank_pattern": ["a"]}, "rank_pattern"),
    ({"rank_pattern": {"a": 1.5}}, "rank_pattern['a']"),
    ({"alpha_pattern": {"a": "x"}}, "alpha_pattern['a']"),
    ({"rank_pattern": {"(": 1}}, "the key '(' of the field rank_pattern"),
    ({"rank_pattern": {"a{99999999999}": 1}}, "rank_pattern"),
    ({"alpha_pattern": {"a" * 513: 1}}, "alpha_pattern of adapter_config.json is longer"),
    ({"alpha_pattern": {str(n): 1 for n in range(10_001)}}, "more than 10000 keys"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS, ids=lambda one: str(one)[:40])
def test_refusals_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse(**fields)
    assert message in str(refusal.value)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe{}",
        b'{"r": 8, "r": 8}',
        b'{"r": 8, "rank_pattern": {"a": 1, "a": 2}}',
        b'{"lora_alpha": NaN}',
        b'{"lora_alpha": Infinity}',
        b'{"lora_alpha": 1e999}',
        b'{"r": ' + b"9" * 5000 + b"}",
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        '{"r": 8}'.encode("utf-16"),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_malformed_and_ambiguous_adapter_configs_are_invalid(text: bytes) -> None:
    with pytest.raises(Invalid, match=r"adapter_config\.json"):
        PeftConfig.parse(text)


MODULES = ["model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj", "lm_head"]
KEYS = st.sampled_from(
    [
        "q_proj",
        "proj",
        "self_attn.q_proj",
        r".*\.self_attn\.q_proj",
        "^model.layers.0.self_attn.q_proj",
        "^q_proj",
        r"layers\.\d+\.mlp\.(up|down)_proj",
        "1.mlp.up_proj",
        "11.mlp.up_proj",
        "lm_head",
        "head",
        ".*",
        "",
        "q_proj$",
        "q_proj|up_proj",
        "model",
    ]
)


@given(
    st.dictionaries(KEYS, st.integers(1, 64)),
    st.dictionaries(KEYS, st.integers(1, 64)),
    st.booleans(),
)
def test_patterns_match_as_in_peft(
    ranks: dict[str, int], alphas: dict[str, int], use_rslora: bool
) -> None:
    config = parse(
        r=5, lora_alpha=7, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=use_rslora
    )
    for module in MODULES:
        rank = ranks.get(get_pattern_key(list(ranks), module), 5)
        alpha = alphas.get(get_pattern_key(list(alphas), module), 7)
        assert config.rank_of(module) == rank
        assert config.scale_of(module) == alpha / (math.sqrt(rank) if use_rslora else rank)
