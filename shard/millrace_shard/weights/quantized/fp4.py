"""Weights of e2m1 with a scale for every few inputs: MXFP4 and NVFP4, and gpt-oss's stacked MXFP4 experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.quantized.fp8 import EXACT
from millrace_shard.weights.quantized.module_tensors import Cut, Groups, ModuleTensors, Shape, Span
from millrace_shard.weights.quantized.quantization import LinearFormat, Quantization
from millrace_shard.weights.quantized.unpacking import FLOAT8, float4_values, nibbles, powers_of_two

MXFP4 = "mxfp4"
"""The method of gpt-oss's checkpoints."""
MX_GROUP = 32
NV_GROUP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Linear(LinearFormat):
    """`weight_packed` [out, in / 2], and `weight_scale` [out, in / 32], exponents of two plus 127."""

    splits_inputs: bool = True
    whole_groups: ClassVar[bool] = True

    def group_size(self, inputs: int) -> int:  # noqa: ARG002
        return MX_GROUP

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        check_width(tensors, cut.inputs, MX_GROUP)
        shape = (cut.outputs, cut.inputs // MX_GROUP)
        exponents = tensors.read("weight_scale", [shape], [torch.uint8], rows=cut.rows)
        scales = mx_scales(tensors, "weight_scale", exponents)
        return _linear(tensors, "weight_packed", cut, scales, MX_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4Linear(LinearFormat):
    """`packed` [out, in / 2], `weight_scale` [out, in / 16] in e4m3, and a scale of the whole tensor."""

    packed: str
    whole: str
    divides: bool
    """Whether scales are divided by the tensor's scale rather than multiplied."""
    splits_inputs: bool = True
    whole_groups: ClassVar[bool] = True

    def group_size(self, inputs: int) -> int:  # noqa: ARG002
        return NV_GROUP

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        check_width(tensors, cut.inputs, NV_GROUP)
        whole = tensors.scales(self.whole, [(), (1,)])
        shape = (cut.outputs, cut.inputs // NV_GROUP)
        scales = tensors.scales("weight_scale", [shape], [FLOAT8], rows=cut.rows)
        scales = scales / whole if self.divides else scales * whole
        if not scales.isfinite().all():
            raise tensors.error(self.whole, "is 0")
        return _linear(tensors, self.packed, cut, scales, NV_GROUP)


def mx_scales(tensors: ModuleTensors, suffix: str, exponents: Tensor) -> Tensor:
    scales = powers_of_two(exponents)
    if not scales.isfinite().all():
        raise tensors.error(suffix, "has the exponent 255, which is not a number")
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
    """Raise UnsupportedModel for inputs that do not fill whole groups."""
    if inputs % size:
        raise UnsupportedModel(
            f"{tensors.module} has {inputs} inputs, which do not fill groups of {size}"
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


EXPERTS = ".experts."
"""Part of the names of experts."""
BYTES = MX_GROUP // 2


def mxfp4() -> Quantization:
    """A checkpoint of quant_method mxfp4, whose linears outside the experts are not quantised."""
    linear = Mxfp4Linear()

    def format_of(names: Sequence[str]) -> Mxfp4Linear | None:
        return linear if any(EXPERTS in name for name in names) else None

    return Quantization(method=MXFP4, summary="mxfp4 experts, groups of 32", format_of=format_of)


def read_expert(
    tensors: ModuleTensors,
    name: str,
    shape: tuple[int, int, int],
    expert: int,
    *,
    rows: slice,
    columns: Span,
) -> QuantizedTensor:
    """A part of one expert of `shape` [experts, outputs, inputs], whose inputs are in groups of 32.

    The tensors are `name`_blocks [experts, outputs, inputs / 32, 16] and `name`_scales [experts, outputs, inputs / 32].
    Raises WeightsError.
    """
    experts, outputs, inputs = shape
    start, end = columns
    check_width(tensors, inputs, MX_GROUP)
    whole = (experts, outputs, inputs // MX_GROUP)
    one = (expert, expert + 1)
    suffix = f"{name}_scales"
    exponents = tensors.read(suffix, [whole], [torch.uint8], rows=one)[0, rows]
    scales = mx_scales(tensors, suffix, exponents)
    packed = tensors.read(f"{name}_blocks", [(*whole, BYTES)], [torch.uint8], rows=one)[0, rows]
    first, last = start // MX_GROUP, -(-end // MX_GROUP)
    codes = nibbles(packed[:, first:last].flatten(1))
    groups = Groups.of(MX_GROUP, columns)
    skipped = start - first * MX_GROUP
    return QuantizedTensor(
        codes=codes[:, skipped : skipped + end - start],
        values=float4_values(),
        scales=scales[:, groups.index],
        group_size=groups.size,
    )
