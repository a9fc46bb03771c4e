"""GPTQ and AWQ: words of codes with a zero and a scale for each output and group of inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.quantized.module_tensors import Cut, Groups, ModuleTensors
from millrace_shard.weights.quantized.quantization import LinearFormat, Quantization
from millrace_shard.weights.quantized.settings import Settings
from millrace_shard.weights.quantized.unpacking import codes_of_words, integers, nibbles, word_span


def input_order(tensors: ModuleTensors, suffix: str, cut: Cut, group_size: int) -> Tensor | None:
    """The inputs [in] int64 in the order of their groups; None if input i is in group i // group_size.

    Raises WeightsError for groups that do not exist, that have other sizes, or that a rank has only a part of.
    """
    permutation = tensors.read(suffix, [(cut.inputs,)], [torch.int32, torch.int64]).long()
    usual = torch.arange(cut.inputs) // group_size
    if torch.equal(permutation, usual):
        return None
    num_groups = int(usual[-1]) + 1
    if permutation.min() < 0 or permutation.max() >= num_groups:
        wrong = int(permutation.min() if permutation.min() < 0 else permutation.max())
        raise tensors.error(suffix, f"names group {wrong} of {num_groups}")
    order = permutation.argsort(stable=True)
    if not torch.equal(permutation[order], usual):
        raise tensors.error(suffix, f"has groups of other sizes than {group_size}")
    if not cut.has_all_inputs:
        raise tensors.error(
            suffix, "scatters the inputs of a group, so only one shard can serve this model"
        )
    return order


CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
BITS = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqLinear(LinearFormat):
    """`qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out], `g_idx` [in]."""

    bits: int
    group: int | None
    zeros_less_one: bool
    """Whether the file has each zero less one, as in the first version of the format."""
    splits_inputs: bool

    def group_size(self, inputs: int) -> int:
        return self.group or inputs

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        size = self.group_size(cut.inputs)
        num_groups = -(-cut.inputs // size)
        order = None
        if "g_idx" in tensors:
            order = input_order(tensors, "g_idx", cut, size)
        groups = Groups.of(size, cut.columns)
        rows = slice(*cut.rows)
        scales = tensors.scales("scales", [(num_groups, cut.outputs)])[groups.index, rows].T
        zeros = self._zeros(tensors, cut, num_groups)[groups.index].T - (1 << (self.bits - 1))
        codes = self._codes(tensors, cut)
        return QuantizedTensor(
            codes=codes if order is None else codes[:, order],
            values=integers(self.bits),
            scales=scales.contiguous(),
            offsets=-zeros * scales if zeros.any() else None,
            group_size=groups.size,
            input_order=order,
        )

    def _codes(self, tensors: ModuleTensors, cut: Cut) -> Tensor:
        """The codes [rows, columns]."""
        per_word = 32 // self.bits
        shape = (-(-cut.inputs // per_word), cut.outputs)
        span = word_span(*cut.columns, per_word)
        words = tensors.read("qweight", [shape], [torch.int32], rows=span)[:, slice(*cut.rows)]
        packed = words.contiguous().view(torch.uint8).view(*words.shape, 4)
        packed = packed.permute(1, 0, 2).reshape(words.shape[1], -1)
        codes = nibbles(packed) if self.bits == 4 else packed
        first = cut.columns[0] - span[0] * per_word
        return codes[:, first : first + cut.columns[1] - cut.columns[0]]

    def _zeros(self, tensors: ModuleTensors, cut: Cut, num_groups: int) -> Tensor:
        """The zeros [groups, rows] float32."""
        per_word = 32 // self.bits
        shape = (num_groups, -(-cut.outputs // per_word))
        words = tensors.read("qzeros", [shape], [torch.int32])
        zeros = codes_of_words(words, self.bits)[:, slice(*cut.rows)]
        if self.zeros_less_one:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        return zeros.float()


def gptq(settings: Settings) -> Quantization:
    """Read the settings of a GPTQ checkpoint. Raises UnsupportedModel."""
    version = settings.choice(
        "checkpoint_format", "format", allowed=CHECKPOINT_FORMATS, default="gptq"
    )
    settings.choice("is_marlin_format", allowed=(False,), default=False)
    settings.choice("pack_dtype", allowed=("int32",), default="int32")
    overrides = [*settings.mapping("dynamic").items()]
    base = _linear(settings, version)
    for pattern, changes in overrides:
        _check_override(settings, pattern, changes)
        if not pattern.startswith("-:"):
            _linear(settings.overridden(changes), version)

    def format_of(names: Sequence[str]) -> GptqLinear | None:
        for pattern, changes in overrides:
            bare = pattern.removeprefix("-:").removeprefix("+:")
            if any(re.match(bare, name) for name in names):
                skips = pattern.startswith("-:")
                return None if skips else _linear(settings.overridden(changes), version)
        return base

    return Quantization(method="gptq", summary=summary("gptq", settings), format_of=format_of)


def auto_round_gptq(settings: Settings) -> Quantization:
    """Read the settings of auto-round with GPTQ's tensors. Raises UnsupportedModel."""
    base, overrides = _linear(settings, "gptq"), settings.mapping("extra_config")
    formats = {name: _override(settings, changes) for name, changes in overrides.items()}

    def format_of(names: Sequence[str]) -> GptqLinear | None:
        return next((formats[name] for name in names if name in formats), base)

    return Quantization(method="gptq", summary=summary("auto-round", settings), format_of=format_of)


def summary(name: str, settings: Settings) -> str:
    """A method with its bits and groups."""
    group = settings.group_size("group_size", "q_group_size")
    bits = settings.value("bits", "w_bit")
    return f"{name}, {bits} bits, " + (f"groups of {group}" if group else "one group an output")


def _override(settings: Settings, changes: object) -> GptqLinear | None:
    if not isinstance(changes, dict):
        raise UnsupportedModel(
            f"{settings.method}: extra_config has {changes!r} in place of an object"
        )
    own = settings.overridden(changes)
    return None if own.value("bits") in (16, 32) else _linear(own, "gptq")


def _linear(settings: Settings, version: str) -> GptqLinear:
    return GptqLinear(
        bits=settings.choice("bits", allowed=BITS),
        group=settings.group_size("group_size"),
        zeros_less_one=version == "gptq",
        splits_inputs=not settings.flag("desc_act"),
    )


def _check_override(settings: Settings, pattern: str, changes: Mapping[str, Any] | object) -> None:
    try:
        re.compile(pattern.removeprefix("-:").removeprefix("+:"))
    except re.error as error:
        raise UnsupportedModel(
            f"{settings.method}: dynamic has {pattern!r}, no regular expression: {error}"
        ) from error
    if not isinstance(changes, dict):
        raise UnsupportedModel(f"{settings.method}: dynamic[{pattern!r}] must be an object")


PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, from the low bits on, of each of its eight outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqLinear(LinearFormat):
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]."""

    group: int | None
    splits_inputs: bool = True

    def group_size(self, inputs: int) -> int:
        return self.group or inputs

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        size, words = self.group_size(cut.inputs), -(-cut.outputs // 8)
        num_groups = -(-cut.inputs // size)
        groups, rows = Groups.of(size, cut.columns), slice(*cut.rows)
        weight = tensors.read("qweight", [(cut.inputs, words)], [torch.int32], rows=cut.columns)
        zeros = tensors.read("qzeros", [(num_groups, words)], [torch.int32])
        scales = tensors.scales("scales", [(num_groups, cut.outputs)])[groups.index, rows].T
        offsets = _codes(zeros, cut)[:, groups.index].float() - 8
        return QuantizedTensor(
            codes=_codes(weight, cut),
            values=integers(4),
            scales=scales.contiguous(),
            offsets=-offsets * scales if offsets.any() else None,
            group_size=groups.size,
        )


def _codes(words: Tensor, cut: Cut) -> Tensor:
    """The codes [rows, n] of the outputs in words [n, out / 8]."""
    span = word_span(*cut.rows, 8)
    unpacked = codes_of_words(words[:, slice(*span)], 4).view(len(words), -1, 8)
    codes = unpacked[..., PLACES].flatten(1)
    first = cut.rows[0] - span[0] * 8
    return codes[:, first : first + cut.rows[1] - cut.rows[0]].T.contiguous()


def awq(settings: Settings) -> Quantization:
    """Read the settings of an AWQ checkpoint. Raises UnsupportedModel."""
    version = settings.value("version", "format")
    lower = version.lower() if isinstance(version, str) else version
    settings.overridden({"version": lower}).choice("version", allowed=("gemm",), default="gemm")
    return _awq("awq", settings)


def auto_round_awq(settings: Settings) -> Quantization:
    """Read the settings of auto-round with AWQ's tensors. Raises UnsupportedModel."""
    return _awq("auto-round", settings)


def _awq(name: str, settings: Settings) -> Quantization:
    settings.choice("bits", "w_bit", allowed=(4,))
    linear = AwqLinear(group=settings.group_size("group_size", "q_group_size"))
    return Quantization(method="awq", summary=summary(name, settings), format_of=lambda _: linear)
