"""The text models of multimodal checkpoints have the logits of the whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.load import load_model
from millrace_testing.models.models import CONFIGS, CPU, Driver, prompt_of

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
    kernels = PlainKernels(deterministic=False)
    model = load_model(
        tmp_path, dtype=torch.float32, kernels=kernels, group=ProcessGroup.single(), device=CPU
    )
    prompt = prompt_of(40)
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([prompt])).logits[0, -1]
    run = Driver(model, kernels, dtype=torch.float32).generate([prompt], 1)[0]
    torch.testing.assert_close(run.logits[0], expected, atol=1e-4, rtol=0)
    assert model.info.model_type == MODELS[name][0]


def test_fields_of_the_outer_object_count(tmp_path: Path) -> None:
    save(tmp_path, "gemma3")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"].pop("eos_token_id", None)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    path.write_text(json.dumps(raw | {"eos_token_id": [5, 6], "dtype": "bfloat16"}))
    raw["text_config"].pop("dtype", None)
    path.write_text(json.dumps(raw | {"eos_token_id": [5, 6], "dtype": "bfloat16"}))
    found = ModelDescription.read(tmp_path)
    assert found.eos_token_ids == (5, 6)
    assert found.dtype == torch.bfloat16


def test_a_head_of_its_own_though_the_outer_object_ties_it(tmp_path: Path) -> None:
    reference = save(tmp_path, "mistral3")
    path = tmp_path / "model.safetensors"
    embedding = reference.get_input_embeddings().weight.detach()
    head = embedding.flip(0).contiguous()
    save_file(load_file(path) | {"language_model.lm_head.weight": head}, path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    kernels = PlainKernels(deterministic=False)
    model = load_model(
        tmp_path, dtype=torch.float32, kernels=kernels, group=ProcessGroup.single(), device=CPU
    )
    prompt = prompt_of(9)
    with torch.no_grad():
        states = reference.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
    run = Driver(model, kernels, dtype=torch.float32).generate([prompt], 1)[0]
    torch.testing.assert_close(run.logits[0], states @ head.T, atol=1e-4, rtol=0)


def test_a_class_whose_prompts_attend_to_later_tokens_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "paligemma",
        "text_config": {**CONFIGS["gemma2"], "model_type": "gemma2"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="'paligemma' is not supported: its tokens attend"):
        ModelDescription.read(tmp_path)
