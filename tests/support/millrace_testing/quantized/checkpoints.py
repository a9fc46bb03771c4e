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
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if expert is None:
        return weights[name]
    experts, index, kind = expert.groups()
    if kind == "down":
        return weights[f"{experts}.down_proj"][int(index)]
    gate, up = weights[f"{experts}.gate_up_proj"][int(index)].chunk(2)
    return gate if kind == "gate" else up
