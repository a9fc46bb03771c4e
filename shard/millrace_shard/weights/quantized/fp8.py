"""Weights of e4m3fn with a scale for the tensor, for each output, or for blocks of outputs and inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.quantized.module_tensors import Cut, Groups, ModuleTensors, Shape
from millrace_shard.weights.quantized.quantization import LinearFormat, Quantization
from millrace_shard.weights.quantized.settings import Settings, is_group
from millrace_shard.weights.quantized.unpacking import (
    FLOAT8,
    float8_values,
    powers_of_two,
)

Block = tuple[int, int]
"""Outputs and inputs that share a scale."""
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
EXACT = "weights are exact; activations are not quantised"
FP8 = f"{EXACT}, but to e4m3 for scaled_mm of CUDA"
"""Of formats whose products may be of activations in e4m3, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Linear(LinearFormat):
    """`weight` [out, in], and a scale by which it is multiplied, whatever its name."""

    block: Block | None = None
    """None: one scale for the tensor, or one for each output."""
    splits_inputs: bool = True
    e4m3_inputs: bool = True

    def group_size(self, inputs: int) -> int:
        return self.block[1] if self.block else inputs

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        shape = (cut.outputs, cut.inputs)
        weight = tensors.read("weight", [shape], [FLOAT8], rows=cut.rows)[:, slice(*cut.columns)]
        scales, size = block_scales(tensors, cut, self.block)
        return QuantizedTensor(
            codes=weight.view(torch.uint8),
            values=float8_values(),
            scales=scales,
            group_size=size,
            e4m3_inputs=self.e4m3_inputs,
        )


def block_scales(tensors: ModuleTensors, cut: Cut, block: Block | None) -> tuple[Tensor, int]:
    """The rank's scales [rows, groups] float32, and their group size."""
    suffix = next((name for name in SCALE_NAMES if name in tensors), SCALE_NAMES[-1])
    rows = torch.arange(*cut.rows)
    if block is None:
        shapes: list[Shape] = [(), (1,), (1, 1), (cut.outputs, 1), (cut.outputs,)]
        scales = _scales(tensors, suffix, shapes).reshape(-1, 1)
        row_scales = scales[rows] if len(scales) == cut.outputs else scales.expand(len(rows), 1)
        return row_scales.contiguous(), cut.columns[1] - cut.columns[0]
    shape = (-(-cut.outputs // block[0]), -(-cut.inputs // block[1]))
    groups = Groups.of(block[1], cut.columns)
    scales = _scales(tensors, suffix, [shape])
    return scales[rows // block[0]][:, groups.index], groups.size


def _scales(tensors: ModuleTensors, suffix: str, shapes: list[Shape]) -> Tensor:
    """Scales as float32; they may be exponents of two."""
    if tensors.dtype(suffix) not in (torch.uint8, torch.float8_e8m0fnu):
        return tensors.scales(suffix, shapes)
    stored = tensors.read(suffix, shapes, [torch.uint8, torch.float8_e8m0fnu])
    scales = powers_of_two(stored.view(torch.uint8))
    if not scales.isfinite().all():
        raise tensors.error(suffix, "has the exponent 255, which is not a number")
    return scales


def fp8(settings: Settings) -> Quantization:
    """Read the settings of a checkpoint of quant_method fp8. Raises UnsupportedModel."""
    settings.choice("fmt", allowed=("e4m3", "float8_e4m3fn"), default="e4m3")
    block = block_of(settings, "weight_block_size")
    shape = (
        "one scale a tensor or output" if block is None else f"blocks of {block[0]} x {block[1]}"
    )
    return _quantization("fp8", f"fp8, {shape}", Fp8Linear(block=block))


def fbgemm_fp8(settings: Settings) -> Quantization:  # noqa: ARG001
    return _quantization("fbgemm_fp8", "fbgemm_fp8, one scale an output", Fp8Linear())


def modelopt_fp8() -> Quantization:
    return _quantization("modelopt", "modelopt FP8, one scale a tensor", Fp8Linear())


def block_of(settings: Settings, *names: str) -> Block | None:
    """The outputs and inputs of a block. Raises UnsupportedModel."""
    value = settings.value(*names)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(map(is_group, value)):
        raise UnsupportedModel(
            f"{settings.method}: {names[0]}={value!r} must be two positive numbers"
        )
    return value[0], value[1]


def _quantization(method: str, summary: str, linear: Fp8Linear) -> Quantization:
    return Quantization(method=method, summary=summary, format_of=lambda _: linear, notes=(FP8,))
