"""Codes of weights in the layout that the kernels read.

The inputs of a group are cut into steps, the last of which is padded; a step has one scale for each output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.device.transfers import Copy
from millrace_shard.kernels.cuda import triton_codes
from millrace_shard.kernels.cuda.triton_codes import E4M3_BY_DEVICE, converts_e4m3
from millrace_shard.kernels.cuda.triton_quantized import INTEGERS, SIXTHS, SUMS, TABLE, Form
from millrace_shard.kernels.quantized import QuantizedTensor

LONGEST_STEP = 64
"""Inputs of a step of longer groups, whose products are added before the sum is scaled."""
FLOAT32_STEP = 32
"""The same in float32, whose products take no tensor cores."""
LEAST_STEP = 16
"""Inputs of the shortest step, which is the depth of an instruction of the tensor cores."""
SCALE_DTYPES = (torch.float16, torch.bfloat16)
"""Scales are stored in the first of these that has their exact values, else in float32."""

MOST_EXACT = 256
"""The largest integer up to which all are exact in every dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCodes:
    """A matrix [out, in] on the device, or with one more axis in front of codes, scales and offsets, several."""

    codes: Tensor
    """uint8 [steps, out, bytes of a step]; a byte has one code, or two of 4 bits, the first in its low half."""
    bits: int
    num_inputs: int
    step: int
    """Inputs of a step, a power of two."""
    group_size: int
    """At most the number of inputs."""
    values: Tensor
    """float32 [16] or [256]: what each code stands for."""
    kind: int
    """How kernels read them: see `triton_quantized` and `triton_codes`."""
    least: int
    """The value of code 0 of INTEGERS, of which each further code stands for one more."""
    lookup: Tensor
    """`values`; six times these for SIXTHS; for SUMS int32, with the bits of both numbers in the dtype of the products,
    of which the first is `values` rounded and the second is what that lacks."""
    scales: Tensor
    """[groups, out] in one of SCALE_DTYPES or float32."""
    offsets: Tensor | None
    """[groups, out] likewise."""
    input_order: Tensor | None
    """int64 [in]: column i belongs to input `input_order[i]`."""
    e4m3_inputs: bool
    """See `QuantizedTensor.e4m3_inputs`."""

    @property
    def num_steps(self) -> int:
        return self.codes.shape[-3]

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def group_steps(self) -> int:
        """Steps of a group; 0 if there is one group."""
        return 0 if self.scales.shape[-2] == 1 else -(-self.group_size // self.step)

    def operands(self, sums: Tensor | None = None) -> tuple[Tensor, ...]:
        """Codes, lookup, scales, offsets and sums for a kernel, which reads none that are missing."""
        offsets = self.scales if self.offsets is None else self.offsets
        return self.codes, self.lookup, self.scales, offsets, self.values if sums is None else sums

    @property
    def form(self) -> Form:
        """What kernels are compiled for."""
        return Form(
            bits=self.bits,
            kind=self.kind,
            least=self.least,
            has_offsets=self.offsets is not None,
            whole_steps=self.num_steps * self.step == self.num_inputs,
            group_steps=self.group_steps,
            inputs=self.step,
        )


def can_join(first: QuantizedTensor, second: QuantizedTensor) -> bool:
    """Whether both are exactly represented by one table, one order of inputs and one size of groups."""
    if first.input_order is None or second.input_order is None:
        same_order = first.input_order is second.input_order
    else:
        same_order = torch.equal(first.input_order, second.input_order)
    small, large = sorted(_group_size(each) for each in (first, second))
    nested = large % small == 0 or large == first.shape[1]
    same_inputs = first.e4m3_inputs == second.e4m3_inputs
    return same_order and nested and same_inputs and _equal(first.values, second.values)


def pack(
    parts: Sequence[QuantizedTensor], dtype: torch.dtype, device: torch.device, copy: Copy
) -> PackedCodes:
    """The concatenation of `parts`, which can be joined, for products in `dtype`; nothing of them is kept."""
    group_size = min(map(_group_size, parts))
    packer = _Packer(dtype, device, copy)
    packed = [packer(_in_groups_of(part, group_size)) for part in parts]
    return packed[0] if len(packed) == 1 else _joined(packed)


def unpacked(weight: PackedCodes) -> Tensor:
    """The matrix [out, in] of `weight` in float32, whose columns are in the order of the codes."""
    codes = weight.codes
    if weight.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    values = weight.values[codes.int()].transpose(0, 1).flatten(1)
    # The step and the group of each column.
    column = torch.arange(weight.num_inputs, device=codes.device)
    group = torch.div(column, weight.group_size, rounding_mode="floor")
    within = column - group * weight.group_size
    padded = (weight.group_steps or weight.num_steps) * weight.step
    matrix = values[:, group * padded + within] * weight.scales.float().t()[:, group]
    return matrix if weight.offsets is None else matrix + weight.offsets.float().t()[:, group]


def step_length(group_size: int, dtype: torch.dtype) -> int:
    """Inputs of a step for products in `dtype`."""
    longest = FLOAT32_STEP if dtype == torch.float32 else LONGEST_STEP
    return min(longest, max(LEAST_STEP, 1 << (group_size - 1).bit_length()))


E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""What each byte stands for in float8_e4m3fn."""
E2M1_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TABLES = {triton_codes.E4M3: E4M3, triton_codes.E2M1: torch.cat((E2M1_SIZES, -E2M1_SIZES))}
"""What codes stand for, by their kinds."""


@dataclass(frozen=True, slots=True)
class _Packer:
    """Copies codes of one byte to the device, and packs them there, for products in `dtype`."""

    dtype: torch.dtype
    device: torch.device
    copy: Copy

    def __call__(self, part: QuantizedTensor) -> PackedCodes:
        step = step_length(part.group_size, self.dtype)
        codes = self._copied(part.codes, torch.uint8)
        kind, values, places = _reading(part.values.cpu(), self.dtype)
        if places is not None:
            codes = places.to(self.device)[codes.int()]
        lookup = _lookup(values, kind, self.dtype)
        if kind == triton_codes.E4M3 and self.dtype != torch.float32 and converts_e4m3(self.device):
            kind = E4M3_BY_DEVICE
        order = part.input_order
        return PackedCodes(
            codes=_in_steps(codes, part, step),
            bits=part.bits,
            num_inputs=part.shape[1],
            step=step,
            group_size=part.group_size,
            values=self._copied(values, torch.float32),
            kind=kind,
            least=int(values[0]) if kind == INTEGERS else 0,
            lookup=self._copied(lookup, lookup.dtype),
            scales=_narrow(self._copied(part.scales, torch.float32)),
            offsets=None
            if part.offsets is None
            else _narrow(self._copied(part.offsets, torch.float32)),
            input_order=None if order is None else self._copied(order, torch.int64),
            e4m3_inputs=part.e4m3_inputs,
        )

    def _copied(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(source.shape, dtype=dtype, device=self.device)
        self.copy(out, source)
        return out


def _in_steps(codes: Tensor, part: QuantizedTensor, step: int) -> Tensor:
    """`codes` [out, in] of one byte as `PackedCodes.codes`."""
    num_groups = part.scales.shape[1]
    padded = F.pad(codes, (0, num_groups * part.group_size - codes.shape[1]))
    groups = padded.view(len(codes), num_groups, part.group_size)
    steps = F.pad(groups, (0, -part.group_size % step)).view(len(codes), -1, step)
    last = codes.shape[1] - (num_groups - 1) * part.group_size
    steps = steps[:, : (num_groups - 1) * -(-part.group_size // step) + -(-last // step)]
    if part.bits == 4:
        steps = steps[..., ::2] | steps[..., 1::2] << 4
    return steps.transpose(0, 1).contiguous()


def _reading(values: Tensor, dtype: torch.dtype) -> tuple[int, Tensor, Tensor | None]:
    """The kind of codes, what they stand for in its order, and their places there, None for each at its own."""
    least = float(values.nan_to_num(0.0).min().floor())
    integers = least + torch.arange(len(values))
    known = {INTEGERS: integers} if integers.abs().max() <= MOST_EXACT else {}
    for kind, table in (known | TABLES).items():
        if _equal(values, table):
            return kind, values, None
        ordered, order = values.sort()
        expected, places = table.sort()
        if _equal(ordered, expected):
            return kind, table, torch.empty_like(places).index_copy_(0, order, places).byte()
    return _kind_of_table(values, dtype), values, None


def _kind_of_table(values: Tensor, dtype: torch.dtype) -> int:
    if _equal(values.to(dtype).float(), values):
        return TABLE
    sixfold = values * 6
    is_exact = _equal(sixfold.to(dtype).float(), sixfold) and _equal(sixfold * (1 / 6), values)
    return SIXTHS if is_exact else SUMS


def _lookup(values: Tensor, kind: int, dtype: torch.dtype) -> Tensor:
    if kind == SIXTHS:
        return values * 6
    if kind != SUMS:
        return values
    first = values.to(dtype)
    second = (values - first.float()).to(dtype)
    high, low = (each.view(torch.int16).int() for each in (first, second))
    return high << 16 | (low & 0xFFFF)


def _narrow(scales: Tensor) -> Tensor:
    """`scales` [out, groups] float32 as [groups, out] in the first dtype that has all their values."""
    turned = scales.t().contiguous()
    for dtype in SCALE_DTYPES:
        narrow = turned.to(dtype)
        if _equal(narrow.float(), turned):
            return narrow
    return turned


def _group_size(part: QuantizedTensor) -> int:
    return min(part.group_size, part.shape[1])


def _in_groups_of(part: QuantizedTensor, group_size: int) -> QuantizedTensor:
    """`part` with its scales repeated for smaller groups."""
    starts = torch.arange(0, part.shape[1], group_size) // _group_size(part)
    return replace(
        part,
        group_size=group_size,
        scales=part.scales[:, starts],
        offsets=None if part.offsets is None else part.offsets[:, starts],
    )


def _joined(packed: Sequence[PackedCodes]) -> PackedCodes:
    """One matrix of the outputs of all."""
    scales = torch.cat([each.scales.float() for each in packed], dim=1)
    offsets: Tensor | None = None
    if any(each.offsets is not None for each in packed):
        offsets = torch.cat(
            [
                torch.zeros(each.scales.shape, device=scales.device)
                if each.offsets is None
                else each.offsets.float()
                for each in packed
            ],
            dim=1,
        )
    return replace(
        packed[0],
        codes=torch.cat([each.codes for each in packed], dim=1),
        scales=_narrow(scales.t()),
        offsets=None if offsets is None else _narrow(offsets.t()),
    )


def _equal(left: Tensor, right: Tensor) -> bool:
    """Whether all numbers are equal; tables may have NaN."""
    if left.shape != right.shape:
        return False
    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
