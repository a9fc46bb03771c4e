"""Tiny random checkpoints with quantised linears, and the models of transformers with the same weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from millrace_testing.models.models import edit_json, save_tiny
from millrace_testing.quantized.linears import FORMATS, Format

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Widths that groups of 32 divide, also among two ranks."""


def save_quantized(
    folder: Path,
    family: str,
    name: str,
    *,
    config: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a checkpoint whose layers are in the format `name`; returns the model of its numbers, in float32.

    `config` is a quantization_config in place of the format's own.
    """
    formats = {"": FORMATS[name]}
    return save_mixed(folder, family, formats, config or FORMATS[name].config, **overrides)


def save_mixed(
    folder: Path,
    family: str,
    formats: Mapping[str, Format | None],
    config: Mapping[str, Any],
    **overrides: Any,
) -> PreTrainedModel:
    """Write a checkpoint; the first of `formats` whose key is part of a linear's name is its format."""
    reference = save_tiny(folder, family, **{**SIZES, **overrides})
    path = folder / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(5)
    weights = dict(reference.named_parameters())
    for name in sorted(tensors):
        module = name.removesuffix(".weight")
        own = next((found for part, found in formats.items() if part in module), None)
        if own is None or not module.endswith("_proj"):
            continue
        outputs, inputs = tensors.pop(name).shape
        packed, values = own.pack(outputs, inputs, generator)
        tensors |= {f"{module}.{kind}": tensor for kind, tensor in packed.items()}
        with torch.no_grad():
            _parameter(weights, name).copy_(values)
    save_file(tensors, path, {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=config)
    return reference


def _parameter(weights: Mapping[str, Tensor], name: str) -> Tensor:
    """The weight of a linear in the class, which stacks experts that the file has one by one."""
    # Nemotron-H's file has another name for the whole.
    name = name.replace("backbone.", "model.")
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if expert is None:
        return weights[name]
    experts, index, kind = expert.groups()
    stacked = f"{experts}.{kind}_proj"
    if stacked in weights:
        return weights[stacked][int(index)]
    gate, up = weights[f"{experts}.gate_up_proj"][int(index)].chunk(2)
    return gate if kind == "gate" else up


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
