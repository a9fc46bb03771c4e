"""compressed-tensors: groups of modules, each with its own format, and the integer formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.quantized.fp4 import Mxfp4Linear, Nvfp4Linear
from millrace_shard.weights.quantized.fp8 import EXACT, FP8, Fp8Linear, block_of
from millrace_shard.weights.quantized.gptq import input_order
from millrace_shard.weights.quantized.module_tensors import Cut, Groups, ModuleTensors, Shape
from millrace_shard.weights.quantized.quantization import LinearFormat, Quantization
from millrace_shard.weights.quantized.settings import Settings
from millrace_shard.weights.quantized.unpacking import (
    codes_of_words,
    integers,
    signed_bytes,
    word_span,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerLinear(LinearFormat):
    """`weight_packed` [out, in * bits / 32] or `weight` [out, in] int8, `weight_scale` and `weight_zero_point`."""

    bits: int
    packed: bool
    group: int | None
    """Inputs of a group; None: one scale for each output."""
    one_scale: bool
    """Whether the whole tensor has one scale."""
    symmetric: bool
    splits_inputs: bool

    def group_size(self, inputs: int) -> int:
        return self.group or inputs

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
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


def _rows(scales: Tensor, cut: Cut) -> Tensor:
    """The rank's rows of one number, of a number for each output, or of rows for each output: [rows, groups]."""
    if scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    first, last = cut.rows
    return scales[first:last] if len(scales) == cut.outputs else scales.expand(last - first, -1)


def _bytes(tensors: ModuleTensors, cut: Cut) -> Tensor:
    shape = (cut.outputs, cut.inputs)
    weight = tensors.read("weight", [shape], [torch.int8], rows=cut.rows)
    return weight[:, slice(*cut.columns)].view(torch.uint8)


METHOD = "compressed-tensors"
PACK, INT, FLOAT, NAIVE, NVFP4, MXFP4 = FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
MIXED = "mixed-precision"
CLASS = "Linear"
KINDS: tuple[Callable[[str, str], bool], ...] = (
    lambda target, name: target == name,
    lambda target, name: target.startswith("re:") and re.match(target[3:], name) is not None,
    lambda target, _: target == CLASS,
)
"""The ways in which a target means a module, the most specific first."""


@dataclass(frozen=True, slots=True)
class Group:
    """Modules of one format."""

    targets: tuple[str, ...]
    linear: LinearFormat
    summary: str


def compressed_tensors(settings: Settings) -> Quantization:
    """Read the settings of a checkpoint of compressed-tensors. Raises UnsupportedModel."""
    whole = settings.choice("format", allowed=(*FORMATS, MIXED), default=MIXED)
    sparsity = settings.mapping("sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise UnsupportedModel(
            f"{METHOD}: sparse weights ({sparsity['format']}) are not supported; dense ones are"
        )
    config_groups = settings.mapping("config_groups")
    groups = [_group(name, group, whole) for name, group in config_groups.items()]
    if not groups:
        raise UnsupportedModel(f"{METHOD}: config_groups names no modules")
    ignore = settings.words("ignore")
    _check_patterns(ignore)
    summaries = dict.fromkeys(group.summary for group in groups)
    raw = [group for group in config_groups.values() if isinstance(group, dict)]
    notes = [EXACT] if any(group.get("input_activations") for group in raw) else []
    if any(_has_e4m3_inputs(group) for group in raw):
        notes = [f"{FP8} where input_activations requests it"]
    return Quantization(
        method=METHOD,
        summary=f"{METHOD}, {'; '.join(summaries)}",
        format_of=lambda names: _format_of(names, groups, ignore),
        notes=tuple(notes),
    )


def _format_of(
    names: Sequence[str], groups: Sequence[Group], ignore: Sequence[str]
) -> LinearFormat | None:
    if any(kind(target, name) for kind in KINDS for target in ignore for name in names):
        return None
    for kind in KINDS:
        for group in groups:
            if any(kind(target, name) for target in group.targets for name in names):
                return group.linear
    return None


def _group(name: str, raw: object, whole: str) -> Group:
    if not isinstance(raw, dict) or not isinstance(raw.get("weights"), dict):
        raise UnsupportedModel(
            f"{METHOD}: config_groups.{name} must be an object whose weights are quantised"
        )
    group = Settings(f"{METHOD}: config_groups.{name}", raw)
    targets = group.words("targets")
    _check_patterns(targets)
    weights = Settings(f"{group.method}.weights", raw["weights"])
    linear_format = group.value("format") or (whole if whole != MIXED else _usual_format(raw))
    make = _MAKERS.get(linear_format) if isinstance(linear_format, str) else None
    if make is None:
        raise UnsupportedModel(
            f"{METHOD}: format {linear_format!r} is not supported; these are: {', '.join(FORMATS)}"
        )
    linear = make(weights)
    if isinstance(linear, Fp8Linear):
        linear = replace(linear, e4m3_inputs=_has_e4m3_inputs(raw))
    return Group(targets, linear, _summary(linear_format, weights))


def _has_e4m3_inputs(raw: Mapping[str, Any]) -> bool:
    inputs = raw.get("input_activations")
    kind = (inputs.get("type"), inputs.get("num_bits")) if isinstance(inputs, dict) else None
    return kind == ("float", 8)


def _usual_format(raw: Mapping[str, Any]) -> str:
    weights = raw["weights"]
    if weights.get("type") == "float":
        return FLOAT if weights.get("num_bits") == 8 else NVFP4
    return INT if raw.get("input_activations") and weights.get("num_bits") == 8 else PACK


def _check_patterns(targets: Sequence[str]) -> None:
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target[3:])
            except re.error as error:
                raise UnsupportedModel(
                    f"{METHOD}: {target!r} is not a regular expression: {error}"
                ) from error


def _summary(name: str, weights: Settings) -> str:
    size = weights.value("group_size")
    shape = f"groups of {size}" if isinstance(size, int) and size > 0 else weights.value("strategy")
    return f"{name}, {weights.value('num_bits')} bits, {shape or 'tensor'}"


def _strategy(weights: Settings, allowed: Sequence[str]) -> str:
    size = weights.group_size("group_size")
    usual = (
        "tensor" if weights.value("group_size") is None else "channel" if size is None else "group"
    )
    return str(weights.choice("strategy", allowed=allowed, default=usual))


def _integer(weights: Settings, *, packed: bool) -> IntegerLinear:
    weights.choice("type", allowed=("int",), default="int")
    strategy = _strategy(weights, ("tensor", "channel", "group"))
    size = weights.group_size("group_size") if strategy == "group" else None
    if strategy == "group" and size is None:
        raise UnsupportedModel(f"{weights.method}: strategy=group needs a group_size")
    order = weights.choice(
        "actorder", allowed=("group", "weight", "static", "dynamic", False), default=False
    )
    return IntegerLinear(
        bits=weights.choice("num_bits", allowed=(4, 8)),
        packed=packed,
        group=size,
        one_scale=strategy == "tensor",
        symmetric=weights.flag("symmetric", default=True),
        splits_inputs=order not in ("group", "dynamic"),
    )


def _float(weights: Settings) -> Fp8Linear:
    weights.choice("type", allowed=("float",))
    weights.choice("num_bits", allowed=(8,))
    strategy = _strategy(weights, ("tensor", "channel", "group", "block"))
    if strategy == "block":
        block = block_of(weights, "block_structure")
        if block is None:
            raise UnsupportedModel(f"{weights.method}: strategy=block needs a block_structure")
        return Fp8Linear(block=block)
    size = weights.group_size("group_size") if strategy == "group" else None
    return Fp8Linear(block=None if size is None else (1, size))


def _naive(weights: Settings) -> LinearFormat:
    kind = weights.choice("type", allowed=("int", "float"), default="int")
    return _float(weights) if kind == "float" else _integer(weights, packed=False)


def _nvfp4(weights: Settings) -> Nvfp4Linear:
    weights.choice("group_size", allowed=(16,), default=16)
    return Nvfp4Linear(packed="weight_packed", whole="weight_global_scale", divides=True)


def _mxfp4(weights: Settings) -> Mxfp4Linear:
    weights.choice("group_size", allowed=(32,), default=32)
    return Mxfp4Linear()


_MAKERS: dict[str, Callable[[Settings], LinearFormat]] = {
    PACK: lambda weights: _integer(weights, packed=True),
    INT: lambda weights: _integer(weights, packed=False),
    FLOAT: _float,
    NAIVE: _naive,
    NVFP4: _nvfp4,
    MXFP4: _mxfp4,
}
