"""Quantised weights of 4 and 8 bits, independent of their file format, and linears over them in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

UNIT_INPUTS = 256


@dataclass(frozen=True, slots=True)
class ScaleUnits:
    """Numbers of which scales and offsets are multiples by integers of 8 bits, one for every UNIT_INPUTS inputs.

    Kernels store such scales in a byte. GGUF's K-quants have them; float16 holds the numbers.
    """

    scales: Tensor
    """float32 [out, units]."""
    offsets: Tensor
    """float32 [out, units], which are ignored if offsets are missing."""

    def each(self, change: Callable[[Tensor], Tensor]) -> ScaleUnits:
        """With both tensors changed."""
        return ScaleUnits(change(self.scales), change(self.offsets))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A matrix [out, in], whose element (o, i) is `scales[o, g] * values[codes[o, i]] + offsets[o, g]`.

    Here g is `i // group_size`. The product and the sum are taken in float32. Tensors may be views of mapped files.
    """

    codes: Tensor
    """uint8 [out, in], one code a byte, each below `len(values)`."""
    values: Tensor
    """float32 [16] or [256], what each code stands for: integers for int4 and int8, a table for nf4, e2m1 or e4m3."""
    scales: Tensor
    """float32 [out, groups]."""
    offsets: Tensor | None = None
    """float32 [out, groups]; zero points are the offsets `-zero * scale`."""
    group_size: int
    """Inputs of a group; the last group may have fewer. One scale for each output is one group of all inputs."""
    input_order: Tensor | None = None
    """int64 [in]: column i of the codes belongs to input `input_order[i]`; None: to input i."""
    units: ScaleUnits | None = None
    """Of `scales` and `offsets`, if they have any; groups then divide UNIT_INPUTS."""
    e4m3_inputs: bool = False
    """Whether the format is for products with inputs in e4m3, which fast mode on CUDA takes for many rows."""

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        groups = (outputs, -(-inputs // self.group_size))
        assert self.codes.dtype is torch.uint8
        assert len(self.values) in (16, 256)
        assert self.scales.shape == groups
        assert self.offsets is None or self.offsets.shape == groups
        assert self.units is None or UNIT_INPUTS % self.group_size == 0

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def bits(self) -> int:
        return len(self.values).bit_length() - 1

    def rows(self, start: int, end: int) -> QuantizedTensor:
        """The outputs from `start` to `end`, as views."""
        offsets = None if self.offsets is None else self.offsets[start:end]
        return replace(
            self,
            codes=self.codes[start:end],
            scales=self.scales[start:end],
            offsets=offsets,
            units=self.units and self.units.each(lambda units: units[start:end]),
        )

    def dequantized(self) -> Tensor:
        """The matrix [out, in] in float32."""
        outputs, inputs = self.shape
        # This is several times as fast as an index of two axes.
        weight = self.values.index_select(0, self.codes.flatten().int())
        grouped = inputs % self.group_size == 0
        weight = weight.view(outputs, -1, self.group_size if grouped else 1)
        scales, offsets = self.scales, self.offsets
        if not grouped:
            group = torch.arange(inputs) // self.group_size
            scales = scales[:, group]
            offsets = None if offsets is None else offsets[:, group]
        weight *= scales.unsqueeze(-1)
        if offsets is not None:
            weight += offsets.unsqueeze(-1)
        weight = weight.view(outputs, inputs)
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFormat:
    """The values of the codes of a `QuantizedTensor`, and the kind of their scales."""

    values: tuple[float, ...]
    """Of 16 or 256 codes."""
    group_size: int | None
    """None: one group of all inputs."""
    has_offsets: bool = False
    has_input_order: bool = False
    has_units: bool = False
    e4m3_inputs: bool = False

    @classmethod
    def of(cls, weight: QuantizedTensor) -> CodeFormat:
        """The format of a weight. Codes without a number stand for 0 here."""
        is_whole = weight.group_size >= weight.shape[1]
        return cls(
            values=tuple(weight.values.nan_to_num(0.0).tolist()),
            group_size=None if is_whole else weight.group_size,
            has_offsets=weight.offsets is not None,
            has_input_order=weight.input_order is not None,
            has_units=weight.units is not None,
            e4m3_inputs=weight.e4m3_inputs,
        )

    def random(
        self, outputs: int, inputs: int, device: torch.device, seed: int = 0
    ) -> QuantizedTensor:
        """A weight of random codes, made on `device`, whose products with a normal distribution are about 1."""
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.tensor(self.values, dtype=torch.float32, device=device)
        finite = values[values.isfinite()]
        group_size = inputs if self.group_size is None else self.group_size
        groups = (outputs, -(-inputs // group_size))
        typical = float(finite.square().mean().sqrt()) * inputs**0.5
        # Zero points are integers, and scales have the precision of files.
        scales = (torch.rand(groups, generator=generator, device=device) + 0.5) / typical
        scales = scales.half().float()
        zeros = torch.rand(groups, generator=generator, device=device).mul(16).floor()
        offsets, units = -zeros * scales, None
        if self.has_units:
            scales, offsets, units = _random_units(groups, group_size, typical, generator)
        codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=device)
        codes.random_(len(values), generator=generator)
        for code in (~values.isfinite()).nonzero().flatten().tolist():
            codes.masked_fill_(codes == code, 0)
        order = torch.randperm(inputs, generator=generator, device=device)
        return QuantizedTensor(
            codes=codes,
            values=values,
            scales=scales,
            offsets=offsets if self.has_offsets else None,
            group_size=group_size,
            input_order=order if self.has_input_order else None,
            units=units,
            e4m3_inputs=self.e4m3_inputs,
        )


def _random_units(
    groups: tuple[int, int], group_size: int, typical: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, ScaleUnits]:
    """Scales of about 1 / `typical` and offsets of eight times that, as whole numbers of units."""
    outputs, device = groups[0], generator.device
    group = torch.arange(groups[1], device=device) * group_size // UNIT_INPUTS
    shape = (outputs, int(group[-1]) + 1)

    def drawn(mean: float) -> tuple[Tensor, Tensor]:
        units = (torch.rand(shape, generator=generator, device=device) + 0.5) * (mean / 32)
        units = units.half().float()
        counts = torch.randint(1, 64, groups, generator=generator, device=device)
        return counts * units[:, group], units

    (scales, of_scales), (offsets, of_offsets) = drawn(1 / typical), drawn(8 / typical)
    return scales, -offsets, ScaleUnits(of_scales, of_offsets)


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
    if not have_common_form(parts):
        return None
    same_values = _with_common_values([_ascending(part) for part in parts])
    size = _common_group_size(parts)
    grouped = [_with_groups_of(part, size) for part in same_values]
    if all(part.offsets is None for part in grouped):
        return grouped
    return [
        part if part.offsets is not None else replace(part, offsets=torch.zeros_like(part.scales))
        for part in grouped
    ]


def have_common_form(parts: Sequence[QuantizedTensor]) -> bool:
    """Whether `in_common_form` can convert `parts`; it reads no codes."""
    same_order = all(_equal(part.input_order, parts[0].input_order) for part in parts)
    return same_order and _common_values([_ascending_values(part) for part in parts]) is not None


def fit_groups(parts: Sequence[QuantizedTensor], step: int) -> bool:
    """Whether `parts` in a common form have groups as `with_groups_of_multiples` makes them."""
    size = _common_group_size(parts)
    return size >= parts[0].shape[1] or size % step == 0 or math.gcd(size, step) == step // 2


def with_groups_of_multiples(
    parts: list[QuantizedTensor], step: int
) -> list[QuantizedTensor] | None:
    """Parts in one form, with groups of multiples of `step` inputs, of half a `step`, or of all; None: impossible."""
    size, inputs = parts[0].group_size, parts[0].shape[1]
    if not fit_groups(parts, step):
        return None
    if size >= inputs or size % step == 0 or size == step // 2:
        return parts
    return [_with_groups_of(part, step // 2) for part in parts]


def _ascending(part: QuantizedTensor) -> QuantizedTensor:
    """A part whose codes are the bits of int8 with ascending codes, which kernels multiply as integers."""
    if not torch.equal(part.values, SIGNED):
        return part
    return replace(part, codes=part.codes ^ SIGN, values=ASCENDING)


def _ascending_values(part: QuantizedTensor) -> Tensor:
    return ASCENDING if torch.equal(part.values, SIGNED) else part.values


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _group_size(part: QuantizedTensor) -> int:
    return min(part.group_size, part.shape[1])


def _common_group_size(parts: Sequence[QuantizedTensor]) -> int:
    return math.gcd(*{_group_size(part) for part in parts})


def _with_common_values(parts: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """The parts, which have a common form, with one table."""
    values = _common_values([part.values for part in parts])
    assert values is not None
    converted = []
    for part in parts:
        if _are_equal(part.values, values):
            converted.append(part)
            continue
        codes = _matches(part.values.unsqueeze(1), values).int().argmax(1).to(torch.uint8)
        converted.append(replace(part, codes=codes[part.codes.int()], values=values))
    return converted


def _common_values(tables: Sequence[Tensor]) -> Tensor | None:
    """A table with the values of all `tables`, of 16 if all are the same 16; None if there are too many."""
    first = tables[0]
    if all(_are_equal(table, first) for table in tables):
        return first
    for wide in tables:
        if len(wide) == MOST_VALUES and all(_holds(wide, table) for table in tables):
            return wide
    values = torch.tensor(sorted({value for table in tables for value in table.tolist()}))
    if len(values) > MOST_VALUES or bool(values.isnan().any()):
        return None
    return torch.cat((values, values.new_zeros(MOST_VALUES - len(values))))


def _holds(values: Tensor, others: Tensor) -> bool:
    return bool(_matches(others.unsqueeze(1), values).any(1).all())


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return len(one) == len(other) and bool(_matches(one, other).all())


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


LARGEST = 127.0
SMALLEST = 1e-30
"""Numbers without a larger one are quantised to zeros: their scale would have no reciprocal in float32."""
ROUNDED_INPUTS = 32
"""Inputs of a row of activations that are quantised with one scale, as in the blocks of GGUF's Q8_0."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [..., n] as int8, and the scale of each row, float32 [..., 1], NaN for rows that are not finite."""
    wide = rows.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # A Python number divided by a tensor is computed as a product with the reciprocal, which rounds twice.
    inverse = torch.where(largest > SMALLEST, torch.full_like(largest, LARGEST) / largest, 0.0)
    quantized = (wide * inverse).round().clamp(-128, 127).nan_to_num(0.0).to(torch.int8)
    worth = largest / LARGEST
    return quantized, torch.where(worth.isfinite(), worth, torch.nan)


def rounded_rows(rows: Tensor) -> Tensor:
    """`rows` [R, n], quantised to int8 with a scale for every ROUNDED_INPUTS of n, as exact numbers in float64."""
    count, size = rows.shape
    padded = F.pad(rows, (0, -size % ROUNDED_INPUTS))
    parts = padded.view(count, padded.shape[1] // ROUNDED_INPUTS, ROUNDED_INPUTS)
    quantized, worth = quantize_rows(parts)
    return (quantized.double() * worth.double()).view(padded.shape)[:, :size]


class PlainQuantizedLinear:
    """A linear whose sums are taken group by group, in float64 over the exact codes."""

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None, *, integer: bool) -> None:
        """With `integer`, rows are quantised to int8 first, in the order of the codes."""
        self._weight = weight
        self._bias = bias
        self._integer = integer

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out] float64."""
        weight = self._weight
        rows = x.reshape(-1, x.shape[-1])
        if weight.input_order is not None:
            rows = rows[:, weight.input_order]
        rows = rounded_rows(rows) if self._integer else rows.double()
        y = rows.new_zeros(len(rows), weight.shape[0])
        for group, start in enumerate(range(0, weight.shape[1], weight.group_size)):
            columns = slice(start, start + weight.group_size)
            values = weight.values[weight.codes[:, columns].int()].double()
            y += (rows[:, columns] @ values.T) * weight.scales[:, group].double()
            if weight.offsets is not None:
                offsets = weight.offsets[:, group].double()
                y += rows[:, columns].sum(1, keepdim=True) * offsets
        if self._bias is not None:
            y += self._bias.double()
        return y.view(*x.shape[:-1], -1)
