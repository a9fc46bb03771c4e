"""A config read without transformers means what it means in transformers."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from millrace_shard.errors import ModelError
from millrace_shard.models.description import ModelDescription, read_any_config
from millrace_shard.models.families.registry import FAMILIES
from millrace_testing.models.models import (
    CONFIGS,
    prompt_of,
    read_driver,
    save_tiny,
)

# As published, but for the layers and the vocabulary, which are fewer.
LLAMA_2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 344,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": 320,
}
LLAMA_3_1: dict[str, Any] = LLAMA_2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [3, 8],
    "mlp_bias": False,
    "num_key_value_heads": 2,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
MISTRAL: dict[str, Any] = {
    name: value for name, value in LLAMA_2.items() if name not in {"pretraining_tp", "rope_scaling"}
} | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
QWEN_2: dict[str, Any] = {
    name: value for name, value in LLAMA_2.items() if name not in {"pretraining_tp", "rope_scaling"}
} | {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "sliding_window": 16,
    "use_sliding_window": False,
}
QWEN_3: dict[str, Any] = QWEN_2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 32,
    "model_type": "qwen3",
    "rope_scaling": None,
}
PUBLISHED = {
    "llama-2": LLAMA_2,
    "llama-3.1": LLAMA_3_1,
    "mistral": MISTRAL,
    "qwen2": QWEN_2,
    "qwen3": QWEN_3,
}

OTHER_ROPES = (
    *("phi3", "gemma3_text", "gemma4_text", "olmo3", "ministral3", "phimoe", "gptj"),
    *("bloom", "mpt", "mamba", "falcon_mamba", "mamba2", "nemotron_h", "kimi_linear"),
)
"""Families that cannot have Llama 3.1's rotary embeddings, the last ones none at all."""
LLAMA_3_ROPE = LLAMA_3_1["rope_scaling"]
ROPES = st.sampled_from(
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_theta": 7.5e5},
        LLAMA_3_ROPE | {"rope_theta": 5e5},
        LLAMA_3_ROPE,
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {},
        None,
    ]
)
COUNTS = st.sampled_from([1, 2, 3, 4, 8, 12, 0, -1, 2.0, True, "4", None])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model_type": st.sampled_from([*FAMILIES]),
    "architectures": st.sampled_from(
        [None, *([name] for family in FAMILIES.values() for name in family.classes)]
    ),
    "hidden_size": st.sampled_from([128, 96, 100]),
    "num_attention_heads": COUNTS,
    "num_key_value_heads": COUNTS,
    "num_hidden_layers": COUNTS,
    "head_dim": st.sampled_from([16, 20, 32, 0, None]),
    "rms_norm_eps": st.sampled_from([1e-6, 1, "1e-6", None]),
    "hidden_act": st.sampled_from(["silu", "swish", "gelu", None]),
    "tie_word_embeddings": st.sampled_from([True, False, 1, None]),
    "attention_bias": st.sampled_from([True, False, None]),
    "mlp_bias": st.sampled_from([True, False, None]),
    "rope_theta": st.sampled_from([1e4, 5e5, 10000, None]),
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
    "sliding_window": st.sampled_from([4, 0, None]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.sampled_from([0, 1, 28]),
    "layer_types": st.sampled_from(
        [None, ["full_attention"] * 3, ["full_attention"], ["sliding_attention"] * 3]
    ),
    "eos_token_id": st.sampled_from([2, [2, 5], [], None, "2"]),
    "dtype": st.sampled_from(["bfloat16", "float32", "float64", None]),
    "torch_dtype": st.sampled_from(["bfloat16", "float16", None]),
    "initializer_range": st.sampled_from([0.02, 7.0]),
    "original_max_position_embeddings": st.just(16),
    "pretraining_tp": st.sampled_from([1, 2]),
    "temperature": st.just(0.7),
    "num_experts": st.just(4),
}


@st.composite
def edited(draw: st.DrawFn) -> dict[str, Any]:
    """A published config with a few fields changed, added or left out."""
    raw = dict(draw(st.sampled_from(list(PUBLISHED.values()))))
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True)):
        raw[name] = draw(FIELDS[name])
    for name in draw(st.lists(st.sampled_from(sorted(raw)), max_size=2, unique=True)):
        raw.pop(name)
    return raw


def assert_same(raw: dict[str, Any], folder: Path) -> None:
    """What transformers makes of `raw`, written in full and with its defaults, gives the same description."""
    (folder / "config.json").write_text(json.dumps(raw))
    ours = ModelDescription.read(folder)
    theirs = read_any_config(folder)
    (folder / "config.json").write_text(json.dumps(theirs.to_dict()))
    assert ModelDescription.read(folder) == ours
    known = (torch.float16, torch.bfloat16, torch.float32)
    assert ours.dtype == (theirs.dtype if theirs.dtype in known else None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    assert_same(PUBLISHED[name], tmp_path)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("rope", [{}, {"rope_parameters": LLAMA_3_ROPE}])
def test_configs_that_transformers_saves_are_read(
    model_type: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    if rope and model_type in OTHER_ROPES:
        pytest.skip("another kind of parameters")
    # Some classes change the object.
    save_tiny(tmp_path, model_type, **copy.deepcopy(rope))
    assert_same(json.loads((tmp_path / "config.json").read_text()), tmp_path)


@given(raw=edited())
@settings(max_examples=400)
def test_any_config_that_is_read_means_the_same_as_in_transformers(
    raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        ModelDescription.read(folder)
        theirs = read_any_config(folder)
    except ModelError as error:
        event(f"refused: {str(error)[:20]}")
        return
    event("read")
    if theirs.model_type != raw.get("model_type"):
        return  # transformers knows a Mistral with `layer_types` as another class.
    assert_same(raw, folder)


def test_a_model_of_the_family_is_loaded_without_transformers(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    code = f"""
import sys, torch
from pathlib import Path
import millrace_shard.commands.serve
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.load import load_model
from millrace_shard.device.process_group import ProcessGroup
load_model(
    Path({str(tmp_path)!r}),
    dtype=torch.float32,
    kernels=PlainKernels(deterministic=True),
    group=ProcessGroup.single(),
    device=torch.device("cpu"),
)
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"mm_tokens_per_image": 4}),
    "mistral3": ("mistral", {"spatial_merge_size": 1}),
    "smolvlm": ("llama", {"scale_factor": 1}),
}
ENCODERS = {
    "gemma3": "siglip_vision_model",
    "mistral3": "pixtral",
    "smolvlm": "smolvlm_vision",
}


def save(folder: Path, name: str) -> Any:
    """Write a random checkpoint of the multimodal class, and return the model."""
    text, more = MODELS[name]
    config = AutoConfig.for_model(
        name,
        text_config={**CONFIGS[text], "model_type": text},
        vision_config={**VISION, "model_type": ENCODERS[name]},
        **more,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.1) if parameter.ndim == 1 else parameter.copy_(noise * 0.15)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_text_models_of_multimodal_ones_match_transformers(name: str, tmp_path: Path) -> None:
    reference = save(tmp_path, name)
    driver = read_driver(tmp_path)
    prompt = prompt_of(40)
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([prompt])).logits[0, -1]
    run = driver.generate([prompt], 1)[0]
    torch.testing.assert_close(run.logits[0], expected, atol=1e-4, rtol=0)
    assert driver.model.info.model_type == MODELS[name][0]


def test_fields_of_the_outer_object_count(tmp_path: Path) -> None:
    save(tmp_path, "gemma3")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"].pop("eos_token_id", None)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    path.write_text(json.dumps(raw | {"eos_token_id": [5, 6], "dtype": "bfloat16"}))
    raw["text_config"].pop("dtype", None)
    path.write_text(json.dumps(raw | {"eos_token_id": [5, 6], "dtype": "bfloat16"}))
    result = ModelDescription.read(tmp_path)
    assert result.eos_token_ids == (5, 6)
    assert result.dtype == torch.bfloat16


def test_a_separate_head_is_used_even_if_the_outer_object_ties_it(tmp_path: Path) -> None:
    reference = save(tmp_path, "mistral3")
    path = tmp_path / "model.safetensors"
    embedding = reference.get_input_embeddings().weight.detach()
    head = embedding.flip(0).contiguous()
    save_file(load_file(path) | {"language_model.lm_head.weight": head}, path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    driver = read_driver(tmp_path)
    prompt = prompt_of(9)
    with torch.no_grad():
        states = reference.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
    run = driver.generate([prompt], 1)[0]
    torch.testing.assert_close(run.logits[0], states @ head.T, atol=1e-4, rtol=0)
