"""MXFP4 experts, stacked in one tensor, as gpt-oss is published."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.model_loader.quantized.cut import Groups, Span
from millrace_shard.model_loader.quantized.methods.fp4 import (
    MX_GROUP,
    Mxfp4Linear,
    check_width,
    mx_scales,
)
from millrace_shard.model_loader.quantized.module_tensors import ModuleTensors
from millrace_shard.model_loader.quantized.quantization import Quantization
from millrace_shard.model_loader.quantized.unpacking import float4_values, nibbles

EXPERTS = ".experts."
"""Part of the names of experts."""
BYTES = MX_GROUP // 2


def mxfp4() -> Quantization:
    """A checkpoint of quant_method mxfp4, whose linears outside the experts are not quantised."""
    linear = Mxfp4Linear()

    def format_of(names: Sequence[str]) -> Mxfp4Linear | None:
        return linear if any(EXPERTS in name for name in names) else None

    return Quantization(method="mxfp4", summary="mxfp4 experts, groups of 32", format_of=format_of)


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
    kind = f"{name}_scales"
    exponents = tensors.read(kind, [whole], [torch.uint8], rows=one)[0, rows]
    scales = mx_scales(tensors, kind, exponents)
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
