"""The text models of multimodal checkpoints have the logits of the whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from millrace_shard.device.process_group import ProcessGroup
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
}


def save(folder: Path, name: str) -> Any:
    """Write a random checkpoint of the multimodal class, and return the model."""
    text, more = MODELS[name]
    siglip = "siglip_vision_model" if name == "gemma3" else "pixtral"
    config = AutoConfig.for_model(
        name,
        text_config={**CONFIGS[text], "model_type": text},
        vision_config={**VISION, "model_type": siglip},
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
def test_logits_of_the_text_model(name: str, tmp_path: Path) -> None:
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
