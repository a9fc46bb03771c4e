"""Tiny gpt-oss checkpoints with experts in MXFP4, and the models of transformers with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from millrace_testing.models.models import edit_json, save_tiny

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def packed(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Random blocks and scales of experts [E, out, in], and their numbers."""
    count, outputs, inputs = shape
    codes = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    size = (count, outputs, inputs // 32)
    scales = torch.randint(119, 124, size, generator=generator, dtype=torch.uint8)
    numbers = E2M1[codes.int()] * torch.exp2(scales.float() - 127).repeat_interleave(32, 2)
    pairs = codes.view(*size, 16, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales, numbers


def save_mxfp4(folder: Path, **overrides: Any) -> PreTrainedModel:
    """Write a tiny checkpoint; returns the model of its numbers, in float32."""
    reference = save_tiny(
        folder, "gpt_oss", **{"hidden_size": 64, "intermediate_size": 64, **overrides}
    )
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(3)
    tensors, parameters = load_file(path), dict(reference.named_parameters())
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks, scales, numbers = packed((count, outputs, inputs), generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            parameters[name].copy_(numbers.transpose(1, 2))
    assert any(name.endswith("_blocks") for name in tensors)
    save_file(tensors, path, {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=CONFIG)
    return reference
