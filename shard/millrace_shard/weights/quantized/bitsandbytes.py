"""bitsandbytes: 4-bit codes of a table in blocks of the flat weight, and int8 with a scale for each output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.json_object import parse_json
from millrace_shard.weights.quantized.module_tensors import Cut, Groups, ModuleTensors
from millrace_shard.weights.quantized.quantization import LinearFormat, Quantization
from millrace_shard.weights.quantized.settings import Settings, is_group
from millrace_shard.weights.quantized.unpacking import nibbles, signed_bytes

BLOCK = 64
"""Elements of the flat weight that share a scale, as transformers writes them."""
PER_127 = 1 / 127


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitLinear(LinearFormat):
    """`weight` [out * in / 2, 1], high bits first, `weight.absmax` [blocks] and `weight.quant_map` [16]."""

    kind: str
    """nf4 or fp4."""
    splits_inputs: bool = True

    def group_size(self, inputs: int) -> int:
        """See LinearFormat: a block may begin inside a row."""
        return math.gcd(inputs, BLOCK)

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        state, count = self._state(tensors), cut.outputs * cut.inputs
        block = _positive(tensors, self._state_name, state, "blocksize")
        if list(state.get("shape", ())) != [cut.outputs, cut.inputs]:
            raise tensors.error(
                self._state_name,
                f"has shape {state.get('shape')!r}, not {[cut.outputs, cut.inputs]}",
            )
        if cut.inputs % 2:
            raise UnsupportedModel(f"{tensors.module}: an odd number of inputs is not supported")
        absmax = self._absmax(tensors, state, -(-count // block))
        stored = tensors.read("weight", [(count // 2, 1), (1, count // 2)], [torch.uint8])
        (first, last), (start, end) = cut.rows, cut.columns
        packed = stored.view(cut.outputs, cut.inputs // 2)[first:last, start // 2 : -(-end // 2)]
        codes = nibbles(packed, high_first=True)[:, start % 2 : start % 2 + end - start]
        groups = Groups.of(math.gcd(cut.inputs, block), cut.columns)
        elements = torch.arange(first, last).unsqueeze(1) * cut.inputs
        inside = groups.index * math.gcd(cut.inputs, block)
        return QuantizedTensor(
            codes=codes,
            values=tensors.scales("weight.quant_map", [(16,)]),
            scales=absmax[(elements + inside) // block],
            group_size=groups.size,
        )

    @property
    def _state_name(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def _state(self, tensors: ModuleTensors) -> Mapping[str, Any]:
        name = self._state_name
        stored = tensors.read(name, [(math.prod(tensors.shape(name)),)], [torch.uint8])
        try:
            state = parse_json(bytes(stored.tolist()))
        except ValueError as error:
            raise tensors.error(name, f"is not JSON: {error}") from error
        if not isinstance(state, dict):
            raise tensors.error(name, "is not a JSON object")
        return state

    def _absmax(self, tensors: ModuleTensors, state: Mapping[str, Any], blocks: int) -> Tensor:
        """The scale of each block; with double quantisation, scales are codes of a table themselves."""
        if "weight.nested_absmax" not in tensors:
            return tensors.scales("weight.absmax", [(blocks,)])
        size = _positive(tensors, self._state_name, state, "nested_blocksize")
        offset = state.get("nested_offset")
        if not isinstance(offset, float) or not math.isfinite(offset):
            raise tensors.error(self._state_name, f"has nested_offset={offset!r}")
        codes = tensors.read("weight.absmax", [(blocks,)], [torch.uint8])
        table = tensors.scales("weight.nested_quant_map", [(256,)])
        scales = tensors.scales("weight.nested_absmax", [(-(-blocks // size),)])
        return table[codes.int()] * scales[torch.arange(blocks) // size] + offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Linear(LinearFormat):
    """`weight` [out, in] int8, and `SCB` [out], the largest magnitude of each output."""

    splits_inputs: bool = True

    def group_size(self, inputs: int) -> int:
        return inputs

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        shape = (cut.outputs, cut.inputs)
        weight = tensors.read("weight", [shape], [torch.int8], rows=cut.rows)
        scales = tensors.scales("SCB", [(cut.outputs,)], [torch.float32], rows=cut.rows)
        return QuantizedTensor(
            codes=weight[:, slice(*cut.columns)].view(torch.uint8),
            values=signed_bytes(),
            scales=(scales * PER_127).unsqueeze(1),
            group_size=cut.columns[1] - cut.columns[0],
        )


def bitsandbytes(settings: Settings) -> Quantization:
    """Read the settings of a bitsandbytes checkpoint. Raises UnsupportedModel."""
    four, eight = (
        settings.flag("load_in_4bit", "_load_in_4bit"),
        settings.flag("load_in_8bit", "_load_in_8bit"),
    )
    if four == eight:
        raise UnsupportedModel("bitsandbytes: one of load_in_4bit and load_in_8bit must be true")
    if eight:
        linear = Int8Linear()
        return Quantization(
            method="bitsandbytes",
            summary="bitsandbytes, 8 bits, one scale an output",
            format_of=lambda _: linear,
            notes=("outliers are not multiplied apart",),
        )
    settings.choice("bnb_4bit_quant_storage", allowed=("uint8",), default="uint8")
    kind = settings.choice("bnb_4bit_quant_type", allowed=("nf4", "fp4"), default="fp4")
    codes = FourBitLinear(kind=kind)
    return Quantization(
        method=f"bitsandbytes-{kind}",
        summary=f"bitsandbytes, {kind}, blocks of {BLOCK}",
        format_of=lambda _: codes,
    )


def _positive(tensors: ModuleTensors, kind: str, state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if not is_group(value):
        raise tensors.error(kind, f"has {name}={value!r}")
    return value
