"""The parts of a fused linear in one form, as kernels read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor

MOST_VALUES = 256
SIGN = 128
"""The bit that the codes of an int8's bits and ascending codes differ in."""
ASCENDING = torch.arange(256.0) - SIGN
SIGNED = ASCENDING.roll(SIGN)
"""The values of codes that are the bits of an int8."""


def in_common_form(parts: Sequence[QuantizedTensor]) -> list[QuantizedTensor] | None:
    """`parts` with equal values, group sizes, input orders and kinds of offsets; None if that is impossible.

    The weights stay exactly as they are. Their parts may share no inputs in the same order, or have more than 256
    different values.
    """
    if not all(_equal(part.input_order, parts[0].input_order) for part in parts):
        return None
    same_values = _with_common_values([_ascending(part) for part in parts])
    if same_values is None:
        return None
    sizes = {_group_size(part) for part in parts}
    size = sizes.pop() if len(sizes) == 1 else math.gcd(*sizes)
    grouped = [_with_groups_of(part, size) for part in same_values]
    if all(part.offsets is None for part in grouped):
        return grouped
    return [
        part if part.offsets is not None else replace(part, offsets=torch.zeros_like(part.scales))
        for part in grouped
    ]


def with_groups_of_multiples(
    parts: list[QuantizedTensor], step: int
) -> list[QuantizedTensor] | None:
    """Parts in one form, with groups of multiples of `step` inputs, of half a `step`, or of all; None: impossible."""
    size, inputs = parts[0].group_size, parts[0].shape[1]
    if size >= inputs or size % step == 0 or size == step // 2:
        return parts
    smaller = math.gcd(size, step)
    return [_with_groups_of(part, smaller) for part in parts] if smaller == step // 2 else None


def _ascending(part: QuantizedTensor) -> QuantizedTensor:
    """A part whose codes are the bits of int8 with ascending codes, which kernels multiply as integers."""
    if not torch.equal(part.values, SIGNED):
        return part
    return replace(part, codes=part.codes ^ SIGN, values=ASCENDING)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _group_size(part: QuantizedTensor) -> int:
    return min(part.group_size, part.shape[1])


def _with_common_values(parts: Sequence[QuantizedTensor]) -> list[QuantizedTensor] | None:
    """The parts with one table, of 16 values if all have the same 16."""
    first = parts[0].values
    if all(len(part.values) == len(first) and _are_equal(part.values, first) for part in parts):
        return list(parts)
    for table in (part.values for part in parts if len(part.values) == MOST_VALUES):
        if (found := _with_values(parts, table)) is not None:
            return found
    values = torch.tensor(sorted({value for part in parts for value in part.values.tolist()}))
    if len(values) > MOST_VALUES:
        return None
    return _with_values(parts, torch.cat((values, values.new_zeros(MOST_VALUES - len(values)))))


def _with_values(parts: Sequence[QuantizedTensor], values: Tensor) -> list[QuantizedTensor] | None:
    """The parts with the table `values`; None if it lacks one of theirs."""
    found = []
    for part in parts:
        matches = _matches(part.values.unsqueeze(1), values)
        if not bool(matches.any(1).all()):
            return None
        codes = matches.int().argmax(1).to(torch.uint8)
        found.append(replace(part, codes=codes[part.codes.int()], values=values))
    return found


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return bool(_matches(one, other).all())


def _matches(one: Tensor, other: Tensor) -> Tensor:
    """Which values are equal; codes without a number, as fp8 has, are equal to each other."""
    return (one == other) | (one.isnan() & other.isnan())


def _with_groups_of(part: QuantizedTensor, size: int) -> QuantizedTensor:
    """The part with groups of `size` inputs, which divides its own."""
    if part.group_size == size:
        return part
    group = torch.arange(0, part.shape[1], size) // part.group_size
    return replace(
        part,
        scales=part.scales[:, group],
        offsets=None if part.offsets is None else part.offsets[:, group],
        group_size=size,
    )
