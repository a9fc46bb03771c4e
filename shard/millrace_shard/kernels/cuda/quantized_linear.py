"""Linears over quantised weights, or over parts of which some are, packed in the layout that the kernels read.

The inputs of a group are cut into steps, the last of which is padded; a step has one scale for each output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
import triton
from torch import Tensor

from millrace_shard.device.transfers import Copy
from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.cuda.linear_tilings import MANY_ROWS, part_length, row_tiling
from millrace_shard.kernels.cuda.triton_codes import converts_e4m3
from millrace_shard.kernels.cuda.triton_linear import add_parts
from millrace_shard.kernels.cuda.triton_quantized import (
    _multiply_codes,
    _sum_steps,
    expand_codes,
)
from millrace_shard.kernels.layer_blocks import SideBySide
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.stored_weight import Part, StoredWeight

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
    least: int | None
    """The value of code 0, if it is an integer and each further code stands for one more."""
    is_e4m3: bool
    """Whether each code has the bits of its value in float8_e4m3fn, and the device converts them."""
    fraction: int
    """Bits of the fraction, where a code is a float of fewer bits; else 0."""
    has_remainder: bool
    """Whether the values are not exact in the dtype of the products."""
    scales: Tensor
    """[groups, out] in one of SCALE_DTYPES or float32."""
    offsets: Tensor | None
    """[groups, out] likewise."""
    input_order: Tensor | None
    """int64 [in]: column i belongs to input `input_order[i]`."""

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

    @property
    def has_whole_steps(self) -> bool:
        """Whether no step is padded."""
        return self.num_steps * self.step == self.num_inputs


def can_join(first: QuantizedTensor, second: QuantizedTensor) -> bool:
    """Whether both are exactly represented by one table, one order of inputs and one size of groups."""
    if first.input_order is None or second.input_order is None:
        same_order = first.input_order is second.input_order
    else:
        same_order = torch.equal(first.input_order, second.input_order)
    small, large = sorted(_group_size(each) for each in (first, second))
    nested = large % small == 0 or large == first.shape[1]
    return same_order and nested and _equal(first.values, second.values)


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
_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FLOATS = {3: E4M3, 1: torch.cat((_SIZES, -_SIZES))}
"""What codes of e4m3 and e2m1 stand for, by the bits of their fractions."""


@dataclass(frozen=True, slots=True)
class _Packer:
    """Copies codes of one byte to the device, and packs them there, for products in `dtype`."""

    dtype: torch.dtype
    device: torch.device
    copy: Copy

    def __call__(self, part: QuantizedTensor) -> PackedCodes:
        step = step_length(part.group_size, self.dtype)
        codes = self._copied(part.codes, torch.uint8)
        values = part.values.cpu()
        least, ranks = _consecutive(values)
        if ranks is not None:
            values = values.sort().values
            codes = ranks.to(self.device)[codes.int()]
        order = part.input_order
        return PackedCodes(
            codes=_in_steps(codes, part, step),
            bits=part.bits,
            num_inputs=part.shape[1],
            step=step,
            group_size=part.group_size,
            values=self._copied(values, torch.float32),
            least=least,
            is_e4m3=self.dtype != torch.float32
            and converts_e4m3(self.device)
            and _equal(values, E4M3),
            fraction=next((bits for bits, table in FLOATS.items() if _equal(values, table)), 0),
            has_remainder=not _equal(values.to(self.dtype).float(), values),
            scales=_narrow(self._copied(part.scales, torch.float32)),
            offsets=None
            if part.offsets is None
            else _narrow(self._copied(part.offsets, torch.float32)),
            input_order=None if order is None else self._copied(order, torch.int64),
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


def _consecutive(values: Tensor) -> tuple[int | None, Tensor | None]:
    """`PackedCodes.least` after each code is replaced with its place in the order of `values`, and these places.

    No places are needed if the values are in order.
    """
    ordered, order = values.sort()
    following = ordered[0].floor() + torch.arange(len(values))
    if not torch.equal(ordered, following) or ordered.abs().max() > MOST_EXACT:
        return None, None
    least = int(ordered[0])
    if torch.equal(ordered, values):
        return least, None
    ranks = torch.empty(len(values), dtype=torch.uint8)
    ranks[order] = torch.arange(len(values), dtype=torch.uint8)
    return least, ranks


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


SUM_STEPS = 8
"""Steps whose inputs a program adds."""

EXPANDED_ROWS = MANY_ROWS
"""Rows from which fast mode expands weights first: with fewer, that takes longer than expanding them in each tile."""
MOST_EXPANDED_BYTES = 32 << 20
"""Weights that are expanded at a time: they are multiplied while they are in the second cache of the GPU."""
EXPANDED_OUTPUTS = 64
"""Outputs of a program that expands a step."""

Plain = Callable[[Tensor, Tensor | None], Linear]
"""Builds a linear from a weight and a bias of the model's dtype."""


def has_codes(weight: StoredWeight) -> bool:
    """Whether any part consists of codes."""
    return any(isinstance(part, QuantizedTensor) for part in weight.parts)


def linear_of_parts(
    weight: StoredWeight,
    bias: Tensor | None,
    plain: Plain,
    out_dtype: torch.dtype,
    *,
    expands: bool = False,
) -> Linear:
    """A linear whose codes stay packed; parts without codes are copied for `plain`, which must return `out_dtype`.

    Neighbouring parts are one product if that is exact, and else several. If it `expands`, see QuantizedLinear.
    """
    linears: list[Linear] = []
    end = 0
    for parts in _runs(weight.parts):
        begin, end = end, end + sum(part.shape[0] for part in parts)
        own_bias = None if bias is None else bias[begin:end]
        coded = [part for part in parts if isinstance(part, QuantizedTensor)]
        if coded:
            packed = pack(coded, weight.dtype, weight.device, weight.copy)
            linears.append(QuantizedLinear(packed, own_bias, out_dtype=out_dtype, expands=expands))
        else:
            linears.append(plain(replace(weight, parts=tuple(parts)).copied(), own_bias))
    return linears[0] if len(linears) == 1 else SideBySide(linears)


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """`parts` in runs, each of which is one matrix."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and all(_are_alike(part, other) for other in runs[-1]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def are_one_matrix(parts: Sequence[QuantizedTensor]) -> bool:
    """Whether `pack` can join `parts`."""
    return all(can_join(part, parts[0]) for part in parts[1:])


def _are_alike(part: Part, other: Part) -> bool:
    if isinstance(part, QuantizedTensor) and isinstance(other, QuantizedTensor):
        return can_join(part, other)
    return isinstance(part, Tensor) and isinstance(other, Tensor)


def sums_of_steps(weight: PackedCodes, x: Tensor) -> Tensor:
    """The sums of the inputs of each step of `x` [T, in]: [steps, T] float32."""
    sums = x.new_empty(weight.num_steps, len(x), dtype=torch.float32)
    _sum_steps[(len(x), triton.cdiv(weight.num_steps, SUM_STEPS))](
        sums,
        x,
        len(x),
        x.stride(0),
        weight.num_inputs,
        weight.num_steps,
        weight.group_size,
        group_steps=weight.group_steps,
        inputs=weight.step,
        steps=SUM_STEPS,
        num_warps=4,
    )
    return sums


def expand(out: Tensor, weight: PackedCodes, first_output: int) -> None:
    """Overwrite `out` [n, in] with the weights of n outputs from the first one on, in the order of the codes."""
    expand_codes[(weight.num_steps, triton.cdiv(len(out), EXPANDED_OUTPUTS))](
        out,
        weight.codes,
        weight.values,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        first_output,
        len(out),
        weight.num_outputs,
        weight.num_inputs,
        weight.group_size,
        bits=weight.bits,
        least=weight.least or 0,
        has_lookup=weight.least is None,
        is_e4m3=weight.is_e4m3,
        fraction=weight.fraction,
        has_offsets=weight.offsets is not None,
        group_steps=weight.group_steps,
        outputs=EXPANDED_OUTPUTS,
        inputs=weight.step,
        num_warps=4,
    )


class QuantizedLinear:
    """A linear over packed codes that adds the products of an output in the same order for any number of rows.

    If it `expands`, it does so for fewer than EXPANDED_ROWS only. More rows are multiplied by the vendor's library with
    weights in the dtype of the rows, a part of the outputs at a time, so that the memory does not grow with the layer.
    """

    def __init__(
        self,
        weight: PackedCodes,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype,
        expands: bool = False,
    ) -> None:
        """Keep `weight` and `bias` [out]."""
        self._weight = weight
        self._bias = bias
        self._out_dtype = out_dtype
        self._expands = expands
        length = part_length(weight.num_outputs, weight.num_steps * weight.step)
        self._part_steps = triton.cdiv(length, weight.step)
        self._num_parts = triton.cdiv(weight.num_steps, self._part_steps)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        weight = self._weight
        num_rows = len(x)
        out = x.new_empty(num_rows, weight.num_outputs, dtype=self._out_dtype)
        if num_rows == 0:
            return out
        if weight.input_order is not None:
            x = x.index_select(1, weight.input_order)
        elif x.stride(1) != 1:
            x = x.contiguous()
        if self._expands and num_rows >= EXPANDED_ROWS:
            return self._multiply_expanded(out, x)
        sums = None if weight.offsets is None else sums_of_steps(weight, x)
        if self._num_parts == 1 or num_rows >= MANY_ROWS:
            self._launch(out, x, sums, num_programs=1, bias=self._bias)
            return out
        shape = (self._num_parts, num_rows, weight.num_outputs)
        partials = x.new_empty(shape, dtype=torch.float32)
        self._launch(partials, x, sums, num_programs=self._num_parts, bias=None)
        add_parts(out, partials, self._bias)
        return out

    def _multiply_expanded(self, out: Tensor, x: Tensor) -> Tensor:
        weight = self._weight
        most = max(1, MOST_EXPANDED_BYTES // (weight.num_inputs * x.element_size()))
        size = min(weight.num_outputs, triton.cdiv(most, EXPANDED_OUTPUTS) * EXPANDED_OUTPUTS)
        room = x.new_empty(size, weight.num_inputs)
        for begin in range(0, weight.num_outputs, size):
            end = min(begin + size, weight.num_outputs)
            expanded, columns = room[: end - begin], out[:, begin:end]
            expand(expanded, weight, begin)
            if self._bias is None:
                torch.mm(x, expanded.t(), out=columns)
            else:
                torch.addmm(self._bias[begin:end], x, expanded.t(), out=columns)
        return out

    def _launch(
        self, out: Tensor, x: Tensor, sums: Tensor | None, *, num_programs: int, bias: Tensor | None
    ) -> None:
        """Multiply, with the parts shared by `num_programs` programs per tile."""
        weight = self._weight
        num_outputs = weight.num_outputs
        tiling = row_tiling(x.dtype, len(x))
        num_tiles = triton.cdiv(len(x), tiling.rows) * triton.cdiv(num_outputs, tiling.outputs)
        _multiply_codes[(num_tiles, num_programs)](
            out,
            x,
            weight.codes,
            weight.values,
            weight.scales,
            weight.scales if weight.offsets is None else weight.offsets,
            weight.values if sums is None else sums,
            weight.values if bias is None else bias,
            len(x),
            x.stride(0),
            num_outputs,
            weight.num_inputs,
            weight.num_steps,
            self._part_steps,
            weight.group_size,
            parts=self._num_parts // num_programs,
            bits=weight.bits,
            least=weight.least or 0,
            has_lookup=weight.least is None,
            is_e4m3=weight.is_e4m3,
            fraction=weight.fraction,
            has_remainder=weight.has_remainder,
            has_offsets=sums is not None,
            has_bias=bias is not None,
            whole_steps=weight.has_whole_steps,
            group_steps=weight.group_steps,
            rows=tiling.rows,
            outputs=tiling.outputs,
            inputs=weight.step,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
