"""The integer formats of compressed-tensors: codes in words or bytes, with zeros where they are not symmetric."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.model_loader.quantized.cut import Cut, Groups
from millrace_shard.model_loader.quantized.methods.input_order import input_order
from millrace_shard.model_loader.quantized.module_tensors import ModuleTensors, Shape
from millrace_shard.model_loader.quantized.unpacking import (
    codes_of_words,
    integers,
    signed_bytes,
    word_span,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerLinear:
    """`weight_packed` [out, in * bits / 32] or `weight` [out, in] int8, `weight_scale` and `weight_zero_point`."""

    bits: int
    packed: bool
    group: int | None
    """Inputs of a group; None: one scale for each output."""
    one_scale: bool
    """Whether the whole tensor has one scale."""
    symmetric: bool
    splits_inputs: bool
    whole_groups: bool = False

    def group_size(self, inputs: int) -> int:
        """See LinearFormat."""
        return self.group or inputs

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        """See LinearFormat."""
        size = self.group_size(cut.inputs)
        shape = (1 if self.one_scale else cut.outputs, -(-cut.inputs // size))
        order = None
        if "weight_g_idx" in tensors:
            order = input_order(tensors, "weight_g_idx", cut, size)
        groups = Groups.of(size, cut.columns)
        shapes: list[Shape] = [shape, (1,), ()] if self.one_scale else [shape]
        if self.group is None:
            shapes.append((cut.outputs,))
        scales = _rows(tensors.scales("weight_scale", shapes), cut)[:, groups.index]
        offsets = None
        if not self.symmetric:
            zeros = _rows(self._zeros(tensors, shape), cut)[:, groups.index]
            offsets = -zeros * scales if zeros.any() else None
        codes = self._packed_codes(tensors, cut) if self.packed else _bytes(tensors, cut)
        return QuantizedTensor(
            codes=codes if order is None else codes[:, order],
            values=integers(self.bits) if self.packed else signed_bytes(),
            scales=scales,
            offsets=offsets,
            group_size=groups.size,
            input_order=order,
        )

    def _packed_codes(self, tensors: ModuleTensors, cut: Cut) -> Tensor:
        per_word = 32 // self.bits
        if "weight_shape" in tensors:
            shape = tensors.read("weight_shape", [(2,)], [torch.int64, torch.int32]).tolist()
            if shape != [cut.outputs, cut.inputs]:
                raise tensors.error("weight_shape", f"is {shape}, not {[cut.outputs, cut.inputs]}")
        width = -(-cut.inputs // per_word)
        words = tensors.read("weight_packed", [(cut.outputs, width)], [torch.int32], rows=cut.rows)
        start, end = cut.columns
        first, last = word_span(start, end, per_word)
        codes = codes_of_words(words[:, first:last], self.bits)
        return codes[:, start - first * per_word : end - first * per_word]

    def _zeros(self, tensors: ModuleTensors, shape: Shape) -> Tensor:
        """The zeros as float32, [outputs or 1, groups] or fewer axes; older files have them as bytes."""
        kind, per_word = "weight_zero_point", 32 // self.bits
        if not self.packed or tensors.dtype(kind) is torch.int8:
            shapes = [shape, (1,), ()] if self.one_scale else [shape]
            return tensors.read(kind, shapes, [torch.int8]).float()
        width = (-(-shape[0] // per_word), shape[1])
        words = tensors.read(kind, [width], [torch.int32])
        codes = codes_of_words(words.T, self.bits)[:, : shape[0]].T
        return codes.float() - (1 << (self.bits - 1))


def _rows(found: Tensor, cut: Cut) -> Tensor:
    """The rank's rows of one number, of a number for each output, or of rows for each output: [rows, groups]."""
    if found.dim() < 2:
        found = found.reshape(-1, 1)
    first, last = cut.rows
    return found[first:last] if len(found) == cut.outputs else found.expand(last - first, -1)


def _bytes(tensors: ModuleTensors, cut: Cut) -> Tensor:
    shape = (cut.outputs, cut.inputs)
    weight = tensors.read("weight", [shape], [torch.int8], rows=cut.rows)
    return weight[:, slice(*cut.columns)].view(torch.uint8)
