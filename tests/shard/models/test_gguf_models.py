"""Models in GGUF files, against transformers' models with the same weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError
from millrace_shard.models.description import family_of
from millrace_shard.weights.gguf.architectures import ARCHITECTURES
from millrace_shard.weights.gguf.config import CLASSES
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.gguf_files import BLOCK_TYPES, TinyGguf, read_config
from millrace_testing.models.models import (
    Run,
    assert_scores_as,
    prompt_of,
    read_driver,
)
from millrace_testing.shards.ranks import run_ranks

PROMPTS = [prompt_of(length, seed=length) for length in (5, 40)]
NUM_TOKENS = 3
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + each / 32 for each in range(32)],
    "long_factor": [2.0 + each / 8 for each in range(32)],
    "original_max_position_embeddings": 64,
    "attention_factor": 1.2,
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e3,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.1386294361119891,
}
SCALED_FULL = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"biases": True}),
    "wide-heads": ("llama", {"head_dim": 128}),
    "window": ("mistral", {"sliding_window": 9}),
    "theta": ("qwen2", {"rope_theta": 1000000.0, "rms_norm_eps": 1e-3}),
    "norms": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 64}),
    "partial": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi-window": ("phi3", {"sliding_window": 9}),
    "linear": ("gemma3_text", {"rope_parameters": TWO_ROPES, "final_logit_softcapping": 2.0}),
    "only-full": ("gemma3_text", {"sliding_window": 0, "layer_types": ["full_attention"] * 7}),
    "caps": ("gemma2", {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 3.0}),
    "largest": ("gemma2", {"num_hidden_layers": 46, "head_dim": 32, "intermediate_size": 256}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "yarn": ("olmo3", {"rope_parameters": SCALED_FULL}),
    "no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 5}),
    "alpha": ("hunyuan_v1_dense", {"rope_parameters": ALPHA}),
    "qkv-biases": ("glm4", {"attention_bias": True}),
    "kinds": ("qwen2_moe", {"kinds": {"experts": "IQ3_S", "shared_expert": "Q6_K"}}),
    "as-many-keys": ("qwen3_5_text", {"linear_num_value_heads": 2}),
    "published": ("gpt_oss", {"kinds": {"experts": "MXFP4"}, "num_local_experts": 4}),
}
WITH_IMAGES = {"qwen2_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
"""Texts that only the model with its encoder computes in transformers: `vision/test_mmproj.py`."""


def generate(folder: Path, group: ProcessGroup | None = None) -> list[Run]:
    with torch.inference_mode():
        return read_driver(folder, group=group).generate(PROMPTS, NUM_TOKENS, chunk=16)


def generate_on_a_rank(group: ProcessGroup, folders: list[Path]) -> list[list[Run]]:
    torch.set_num_threads(1)
    return [generate(folder, group) for folder in folders]


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_logits_of_all_block_types_match_transformers(kind: str, tmp_path: Path) -> None:
    tiny = TinyGguf("llama", kind)
    folder = prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    assert_scores_as(tiny.model, PROMPTS, generate(folder))


@pytest.mark.parametrize("kind", ["F32", "Q4_K", "IQ2_S"])
@pytest.mark.parametrize("family", [name for name in CLASSES if name not in WITH_IMAGES])
def test_logits_of_all_families_match_transformers(family: str, kind: str, tmp_path: Path) -> None:
    tiny = TinyGguf(family, kind)
    folder = prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    assert_scores_as(tiny.model, PROMPTS, generate(folder))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_family_match_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[name]
    tiny = TinyGguf(family, "Q8_0", seed=1, **overrides)
    folder = prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    assert read_config(folder)["model_type"] == family
    assert_scores_as(tiny.model, PROMPTS, generate(folder))


def test_block_types_without_a_kernel_are_named_with_their_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = TinyGguf("llama", "Q4_K", kinds={"mlp": "IQ2_XXS", "v_proj": "Q2_K"})
    folder = prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    with caplog.at_level(logging.INFO):
        generate(folder)
    notes = [text for text in caplog.messages if "no kernel has" in text]
    assert [note.partition(", with")[0].removeprefix("quantised weights: ") for note in notes] == [
        "no kernel has Q2_K: 2 tensors of 2 layers run as codes of 4 bits",
        "no kernel has IQ2_XXS: 6 tensors of 2 layers run as codes of 4 bits",
    ]


def test_ranks_share_the_blocks_of_a_row(tmp_path: Path) -> None:
    # Four ranks hold 64 of the 256 inputs of o_proj each: a quarter of a block of Q6_K.
    jobs = {
        2: {
            "llama": "Q4_1",
            "phi3": "Q4_K",
            "gpt_oss": "MXFP4",
            "gemma3_text": "IQ3_S",
            "qwen3_5_text": "Q4_K",
        },
        4: {"qwen2": "Q6_K", "qwen3": "Q4_K", "qwen2_moe": "IQ4_NL", "smollm3": "F16"},
    }
    for world_size, kinds in jobs.items():
        files = [TinyGguf(family, kind, seed=2) for family, kind in kinds.items()]
        folders = [
            prepare_gguf(
                tiny.write(tmp_path / f"{family}.gguf"), tmp_path / "cache", tokenizer=None
            )
            for family, tiny in zip(kinds, files, strict=True)
        ]
        for runs in run_ranks(tmp_path, world_size, generate_on_a_rank, folders):
            for tiny, run in zip(files, runs, strict=True):
                assert_scores_as(tiny.model, PROMPTS, run)


@pytest.mark.parametrize("kind", ["Q4_K", "MXFP4", "IQ2_XS"])
def test_experts_stay_codes_on_cpu(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a model in bfloat16: their weights are exact, and only activations are rounded."""
    tiny = TinyGguf("gpt_oss", kinds={"experts": kind}, num_hidden_layers=2)
    folder = prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    kernels = make_kernels("cpu", deterministic=True)
    with torch.inference_mode():
        model = read_driver(folder, kernels, dtype=torch.bfloat16)
        scores = torch.stack(model.generate(PROMPTS, 1, chunk=16)[1].logits).float().log_softmax(-1)
        expected = tiny.model(torch.tensor([PROMPTS[1]])).logits[:, -1].log_softmax(-1)
    assert "dequantized" not in caplog.text
    assert float((expected.exp() * (expected - scores)).sum()) < 0.05


ODD: dict[str, tuple[str, dict[str, Any], str]] = {
    "vision": ("llama", {"general.architecture": "clip"}, r"m.gguf is for images \(mmproj\)"),
    "no rope": ("granite", {"granite.rope.scaling.finetuned": False}, "finetuned=False means"),
    "sections": ("glm4", {"glm4.rope.dimension_sections": [8, 8, 0, 0]}, "dimension_sections="),
    "drafts": ("glm4", {"glm4.nextn_predict_layers": 1}, "glm4.nextn_predict_layers=1 is not"),
    "pattern": ("exaone4", {"exaone4.attention.sliding_window_pattern": [True]}, "a flag for each"),
    "bases": ("gpt_oss", {"gpt-oss.rope.freq_base_swa": 5.0}, "freq_base_swa=5.0 is not supported"),
    "gates": ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func=2 is not"),
    "epsilon": (
        "cohere2",
        {"cohere2.attention.layer_norm_epsilon": None},
        "has no cohere2.attention",
    ),
    "experts": (
        "gpt_oss",
        {"gpt-oss.expert_count": 9},
        r"ffn_\w+.weight in m.gguf has shape \[8, ",
    ),
    "partial": (
        "olmo2",
        {"olmo2.rope.dimension_count": 32},
        "olmo2.rope.dimension_count=32 are not",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_a_family_does_not_compute_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, metadata, message = ODD[name]
    tiny = TinyGguf(family, metadata=metadata)
    tiny.arch = metadata.get("general.architecture", tiny.arch)
    with pytest.raises(ModelError, match=message):
        prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    tiny = TinyGguf("qwen3_5_text", metadata={"qwen35.block_count": 5})
    tiny.tensors["blk.4.nextn.eh_proj.weight"] = tiny.tensors["blk.0.ffn_gate.weight"]
    with pytest.raises(ModelError, match=r"tensor blk\.4\..* is missing from one\.gguf"):
        prepare_gguf(tiny.write(tmp_path / "one.gguf"), tmp_path / "cache", tokenizer=None)
    tiny.metadata["qwen35.nextn_predict_layers"] = 1
    folder = prepare_gguf(tiny.write(tmp_path / "two.gguf"), tmp_path / "cache", tokenizer=None)
    assert_scores_as(tiny.model, PROMPTS, generate(folder))


def test_rates_and_layers_that_cannot_be_are_named(tmp_path: Path) -> None:
    tiny = TinyGguf("qwen3_5_text")
    rates, kind = tiny.tensors["blk.0.ssm_a"]
    tiny.tensors["blk.0.ssm_a"] = (np.abs(rates.view(np.float32)).view(rates.dtype), kind)
    folder = prepare_gguf(tiny.write(tmp_path / "one.gguf"), tmp_path / "cache", tokenizer=None)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ssm_a must have values below 0 only"):
        generate(folder)
    tiny.metadata["qwen35.nextn_predict_layers"] = 4
    with pytest.raises(ModelError, match="nextn_predict_layers=4 of 4 layers leave none"):
        prepare_gguf(tiny.write(tmp_path / "two.gguf"), tmp_path / "cache", tokenizer=None)


def test_factors_of_rotary_embeddings_are_checked(tmp_path: Path) -> None:
    tiny = TinyGguf("phi3", rope_parameters=LONGROPE, max_position_embeddings=64)
    whole = tiny.tensors.pop("rope_factors_long.weight")
    with pytest.raises(ModelError, match=r"has rope_factors_short.weight of rope_factors_long"):
        prepare_gguf(tiny.write(tmp_path / "one.gguf"), tmp_path / "cache", tokenizer=None)
    tiny.tensors["rope_factors_long.weight"] = (whole[0][:-8], "F32")
    with pytest.raises(ModelError, match=r"rope_factors_long.weight has shape \[30\], and 64 ch"):
        prepare_gguf(tiny.write(tmp_path / "short.gguf"), tmp_path / "cache", tokenizer=None)


def test_every_architecture_is_a_family_of_the_decoder() -> None:
    assert {each.model_type for each in ARCHITECTURES.values()} <= CLASSES.keys()
    for model_type, name in CLASSES.items():
        family = family_of({"model_type": model_type})
        assert family is not None
        assert name in family.classes
