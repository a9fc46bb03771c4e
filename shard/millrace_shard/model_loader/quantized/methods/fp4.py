"""Weights of e2m1 with a scale for every few inputs: MXFP4 and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.model_loader.quantized.cut import Cut, Groups
from millrace_shard.model_loader.quantized.methods.fp8 import EXACT
from millrace_shard.model_loader.quantized.module_tensors import ModuleTensors, Shape
from millrace_shard.model_loader.quantized.quantization import Quantization
from millrace_shard.model_loader.quantized.unpacking import (
    FLOAT8,
    float4_values,
    nibbles,
    powers_of_two,
)

MX_GROUP = 32
NV_GROUP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Linear:
    """`weight_packed` [out, in / 2], and `weight_scale` [out, in / 32], exponents of two plus 127."""

    splits_inputs: bool = True
    whole_groups: bool = True

    def group_size(self, inputs: int) -> int:  # noqa: ARG002
        """See LinearFormat."""
        return MX_GROUP

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        """See LinearFormat."""
        check_width(tensors, cut.inputs, MX_GROUP)
        shape = (cut.outputs, cut.inputs // MX_GROUP)
        exponents = tensors.read("weight_scale", [shape], [torch.uint8], rows=cut.rows)
        scales = mx_scales(tensors, "weight_scale", exponents)
        return _linear(tensors, "weight_packed", cut, scales, MX_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4Linear:
    """`packed` [out, in / 2], `weight_scale` [out, in / 16] in e4m3, and a scale of the whole tensor."""

    packed: str
    whole: str
    divides: bool
    """Whether scales are divided by that of the tensor, not multiplied."""
    splits_inputs: bool = True
    whole_groups: bool = True

    def group_size(self, inputs: int) -> int:  # noqa: ARG002
        """See LinearFormat."""
        return NV_GROUP

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        """See LinearFormat."""
        check_width(tensors, cut.inputs, NV_GROUP)
        whole = tensors.scales(self.whole, [(), (1,)])
        shape = (cut.outputs, cut.inputs // NV_GROUP)
        scales = tensors.scales("weight_scale", [shape], [FLOAT8], rows=cut.rows)
        scales = scales / whole if self.divides else scales * whole
        if not scales.isfinite().all():
            raise tensors.error(self.whole, "is 0")
        return _linear(tensors, self.packed, cut, scales, NV_GROUP)


def mx_scales(tensors: ModuleTensors, kind: str, exponents: Tensor) -> Tensor:
    """The scales float32 of exponents uint8."""
    scales = powers_of_two(exponents)
    if not scales.isfinite().all():
        raise tensors.error(kind, "has the exponent 255, which is no number")
    return scales


def _linear(
    tensors: ModuleTensors, kind: str, cut: Cut, scales: Tensor, size: int
) -> QuantizedTensor:
    """The rank's part of codes in the tensor `kind`, over `scales` [rows, groups of all inputs]."""
    shape: Shape = (cut.outputs, cut.inputs // 2)
    start, end = cut.columns
    packed = tensors.read(kind, [shape], [torch.uint8], rows=cut.rows)
    codes = nibbles(packed[:, start // 2 : -(-end // 2)])
    groups = Groups.of(size, cut.columns)
    return QuantizedTensor(
        codes=codes[:, start % 2 : start % 2 + end - start],
        values=float4_values(),
        scales=scales[:, groups.index],
        group_size=groups.size,
    )


def check_width(tensors: ModuleTensors, inputs: int, size: int) -> None:
    """Raise UnsupportedModel for inputs that are no whole groups."""
    if inputs % size:
        raise UnsupportedModel(
            f"{tensors.module} has {inputs} inputs, which are no groups of {size}"
        )


def modelopt_nvfp4() -> Quantization:
    """A checkpoint of quant_method modelopt, whose algorithm is NVFP4."""
    linear = Nvfp4Linear(packed="weight", whole="weight_scale_2", divides=False)
    return Quantization(
        method="modelopt",
        summary="modelopt NVFP4, groups of 16",
        format_of=lambda _: linear,
        notes=(EXACT,),
    )
