"""Images by an mmproj file beside a GGUF file, against the checkpoint that both were converted from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from millrace_shard.batch.step import StepResult
from millrace_shard.vision.registry import read_vision
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.engines.image_stepper import ROWS, ImageStepper
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.mmproj_files import KINDS, TinyPair
from millrace_testing.models.models import assert_scores_as, prompt_of, read_driver
from millrace_testing.models.vision_models import (
    Prompt,
    picture,
    prompt_of_sizes,
    prompt_with,
    spec_of,
)

SIZES = ((1, 16), (3, 5), (2, 2))
"""The first is wider than a window of Qwen 2.5 VL."""
LOSSY = ("gemma3", "qwen3_5", "qwen3_5_moe")
"""Families whose files hold norms plus 1, which loses bits."""


def prepared(pair: TinyPair, tmp_path: Path) -> Path:
    text, encoder = pair.write(tmp_path / "m.gguf")
    return prepare_gguf(text, tmp_path / "cache", tokenizer=None, mmproj=encoder)


def prompt_for(family: str, folder: Path) -> Prompt:
    if KINDS[family].is_qwen:
        return prompt_of_sizes(SIZES)
    spec = spec_of(folder)
    sizes = [(24, 24), (8, 16)] if spec.cell else [(24, 24)] * 2
    pictures = [picture(1, seed=tall, size=tall, width=wide) for tall, wide in sizes]
    rows = [spec.rows_of(*size) for size in sizes]
    return prompt_with(pictures, rows if spec.cell else ROWS)


def answer(folder: Path, prompt: Prompt) -> tuple[torch.Tensor, StepResult]:
    """The features of all pictures, and what follows the prompt."""
    stepper = ImageStepper(folder, make_kernels("plain", deterministic=True))
    stepper.put_all(prompt.pictures)
    return stepper.features.values.clone(), stepper.run(stepper.admission_of(0, prompt))


@pytest.mark.parametrize("family", KINDS)
def test_features_and_logits_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    pair = TinyPair(family, tmp_path / "hf")
    folder, prompt = prepared(pair, tmp_path), prompt_for(family, pair.folder)
    features, result = answer(folder, prompt)
    expected, of_checkpoint = answer(pair.folder, prompt)
    if family in LOSSY:
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=0)
        assert result.ids.tolist() == of_checkpoint.ids.tolist()
    else:
        assert torch.equal(features, expected)
        assert result.top_logprobs.tobytes() == of_checkpoint.top_logprobs.tobytes()
    if family == "llava_next":
        # Its features with grids are compared with transformers' in test_vision.py.
        return
    best = prompt.logits(pair.model, spec_of(folder))[-1].log_softmax(-1).topk(5)
    assert sorted(result.top_ids.tolist()) == sorted(best.indices.tolist())
    logprobs = torch.from_numpy(np.sort(result.top_logprobs))
    torch.testing.assert_close(logprobs, best.values.sort().values, atol=1e-4, rtol=0)


def test_the_large_encoder_of_internvl_has_other_norms_and_biases(tmp_path: Path) -> None:
    """In a file that lost axes of one element, as ggml's tools write it."""
    vision = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True}
    pair = TinyPair("internvl", tmp_path / "hf", vision=vision)
    assert pair.tensors["v.class_embd"].ndim == 3
    pair.tensors = {name: data.squeeze() for name, data in pair.tensors.items()}
    folder, prompt = prepared(pair, tmp_path), prompt_for("internvl", pair.folder)
    features, result = answer(folder, prompt)
    expected, of_checkpoint = answer(pair.folder, prompt)
    assert torch.equal(features, expected)
    assert result.top_logprobs.tobytes() == of_checkpoint.top_logprobs.tobytes()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_without_the_file_the_text_model_answers_as_its_class_without_axes(
    family: str, tmp_path: Path
) -> None:
    pair = TinyPair(family, tmp_path / "hf")
    folder = prepare_gguf(pair.text.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    assert read_vision(folder) is None
    prompts = [prompt_of(20)]
    assert_scores_as(pair.text.model, prompts, read_driver(folder).generate(prompts, 2, chunk=16))
