"""Products of rows with packed codes, whose bits for a row are the same for any number of rows.

Codes are multiplied as they are: what they stand for, or 6 times that, is exact in the dtype of the model, or is the
sum of two numbers of that dtype. The products of a step are added in float32, the sum is multiplied with the scale of
its group, and the results are added in the order of the steps, in parts that follow from the shape of the layer, as in
`triton_linear`. An offset is multiplied with the sum of the inputs of the step, which `_sum_steps` takes beforehand,
row by row.

Products with scales are fused explicitly, as in `triton_softmax`: two compilations of the same code give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from millrace_shard.kernels.cuda import triton_codes
from millrace_shard.kernels.cuda.triton_codes import numbers
from millrace_shard.kernels.cuda.triton_experts import tile_of_expert
from millrace_shard.kernels.cuda.triton_linear import dot, tile_of

INTEGERS, TABLE, SIXTHS, SUMS = 16, 17, 18, 19
"""Further kinds of codes: integers that ascend by one, and places in a table of numbers, of sixths, or of sums."""

_SIXTHS = tl.constexpr(SIXTHS)
_SIXTH = tl.constexpr(1 / 6)
_INTEGERS = tl.constexpr(INTEGERS)
_TABLE = tl.constexpr(TABLE)
_SUMS = tl.constexpr(SUMS)
_RAISED_BF16 = triton_codes.RAISED_BF16


class Form(NamedTuple):
    """What kernels over codes are compiled for; see `PackedCodes`."""

    bits: int
    kind: int
    """One of the kinds above, or of `triton_codes`."""
    least: int
    """The value of code 0 of integers."""
    has_offsets: bool
    whole_steps: bool
    """Whether no step is padded."""
    group_steps: int
    """Steps of a group; 0 if there is one group."""
    inputs: int
    """Of a step."""


@triton.jit
def _first_input(step, group_size, group_steps: tl.constexpr, inputs: tl.constexpr):
    """The group of `step`, and its first input."""
    if group_steps == 0:
        return step * 0, step * inputs
    group = step // group_steps
    return group, group * group_size + step % group_steps * inputs


@triton.jit
def _inputs(
    rows,
    has_row,
    step,
    group_size,
    num_inputs,
    form: tl.constexpr,
):
    """The inputs [m, inputs] of `step` for `rows` [m, 1] of pointers; 0 past the end of the group."""
    group, first = _first_input(step, group_size, form.group_steps, form.inputs)
    column = first + tl.arange(0, form.inputs)
    if form.whole_steps:
        return tl.load(rows + column[None, :], mask=has_row, other=0.0)
    end = tl.minimum(group * group_size + group_size, num_inputs)
    return tl.load(rows + column[None, :], mask=has_row & (column < end)[None, :], other=0.0)


@triton.jit
def _values(codes, lookup, step, output, num_outputs, form: tl.constexpr, element: tl.constexpr):
    """The values of the codes of `step` for `output`s [n], times 6 for SIXTHS, and their remainders.

    [n, inputs] each, float32, or `element` where that is exact; values of SUMS have remainders in `element`.
    """
    step_bytes: tl.constexpr = form.inputs * form.bits // 8
    place = (step * num_outputs + output).to(tl.int64) * step_bytes
    at = tl.arange(0, step_bytes)
    raw = tl.load(
        codes + place[:, None] + at[None, :], mask=(output < num_outputs)[:, None], other=0
    )
    if form.bits == 4:
        raw = tl.join(raw & 15, raw >> 4).reshape(output.shape[0], form.inputs)
    if form.kind == _INTEGERS:
        values = _integers(raw, form.bits, form.least, element)
        rest = values
    elif form.kind >= _TABLE:
        # The pipeliner would take indirect loads from memory for tiles, and keep their results in shared memory.
        table = tl.load(lookup + tl.arange(0, 1 << form.bits))
        flat = tl.gather(table, raw.to(tl.int32).reshape(output.shape[0] * form.inputs), 0)
        values = flat.reshape(output.shape[0], form.inputs)
        rest = values
        if form.kind == _SUMS:
            # Both numbers are bits of one word, so none is rounded or subtracted here.
            rest = values.to(tl.uint16).to(element, bitcast=True)
            values = (values >> 16).to(tl.uint16).to(element, bitcast=True)
    else:
        values = numbers(raw, form.kind, element)
        rest = values
    return values, rest


@triton.jit
def _integers(codes, bits: tl.constexpr, least: tl.constexpr, element: tl.constexpr):
    """`codes` plus `least`, in `element` or float32."""
    if element == tl.float16 or (element == _RAISED_BF16 and bits == 4):
        # The bits of a power of two with the code as the last ones of its fraction, so no integer is converted.
        raised: tl.constexpr = 1024 if element == tl.float16 else 128
        pattern: tl.constexpr = 0x6400 if element == tl.float16 else 0x4300
        biased = (codes.to(tl.uint16) | pattern).to(element, bitcast=True)
        values = biased - (raised - least)
    elif element == _RAISED_BF16 and least == -128:
        # 128 plus seven bits of the code, less 256, or less 128 where its eighth bit is set.
        wide = codes.to(tl.uint16)
        biased = ((wide & 0x7F) | 0x4300).to(element, bitcast=True)
        values = biased - ((wide & 0x80) ^ 0x4380).to(element, bitcast=True)
    else:
        values = (codes.to(tl.int32) + least).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["num_rows"])
def _sum_steps(
    sums,
    x,
    num_rows,
    row_stride,
    num_inputs,
    num_steps,
    group_size,
    group_steps: tl.constexpr,
    inputs: tl.constexpr,
    steps: tl.constexpr,
):
    """The sums of the inputs of each step, `sums` [num_steps, num_rows] float32; grid (num_rows, blocks of `steps`)."""
    row = tl.program_id(0)
    step = tl.program_id(1) * steps + tl.arange(0, steps)
    group, first = _first_input(step, group_size, group_steps, inputs)
    column = first[:, None] + tl.arange(0, inputs)[None, :]
    end = tl.minimum(group * group_size + group_size, num_inputs)
    known = (column < end[:, None]) & (step < num_steps)[:, None]
    raw = tl.load(x + row.to(tl.int64) * row_stride + column, mask=known, other=0.0)
    total = tl.sum(raw.to(tl.float32), 1)
    tl.store(sums + step * num_rows + row, total, mask=step < num_steps)


@triton.jit
def _add_step(summed, x_rows, row, has_row, weight, step, output, sizes, form: tl.constexpr):
    """`summed` [outputs, rows] and the products of `step`, for `x_rows` [rows, 1] of pointers to the rows `row`.

    `weight` has codes, lookup, scales, offsets and sums; `sizes` the numbers of rows, outputs, inputs, and inputs of a
    group.
    """
    codes, lookup, scales, offsets, sums = weight
    num_rows, num_outputs, num_inputs, group_size = sizes
    element: tl.constexpr = x_rows.dtype.element_ty
    has_output = output < num_outputs
    right = tl.trans(_inputs(x_rows, has_row[:, None], step, group_size, num_inputs, form))
    left, rest = _values(codes, lookup, step, output, num_outputs, form, element)
    product = dot(left.to(element), right, tl.zeros(summed.shape, tl.float32))
    if form.kind == _SUMS:
        product = dot(rest, right, product)
    group, _ = _first_input(step, group_size, form.group_steps, form.inputs)
    place = group * num_outputs + output
    scale = tl.load(scales + place, mask=has_output, other=0.0).to(tl.float32)
    if form.kind == _SIXTHS:
        scale = scale * _SIXTH
    summed = tl.fma(product, tl.broadcast_to(scale[:, None], summed.shape), summed)
    if form.has_offsets:
        offset = tl.load(offsets + place, mask=has_output, other=0.0).to(tl.float32)
        of_rows = tl.load(sums + step * num_rows + row, mask=has_row, other=0.0)
        offset = tl.broadcast_to(offset[:, None], summed.shape)
        summed = tl.fma(offset, tl.broadcast_to(of_rows[None, :], summed.shape), summed)
    return summed


@triton.jit
def _store_tile(out, total, bias, where, output, has_output, has_row, has_bias: tl.constexpr):
    """Store `total` [outputs, rows] and the bias of its outputs at `where`, the first output of each row."""
    if has_bias:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[:, None]
    mask = has_output[:, None] & has_row[None, :]
    tl.store(out + where[None, :] + output[:, None], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_codes(
    out,
    x,
    codes,
    lookup,
    scales,
    offsets,
    sums,
    bias,
    num_rows,
    row_stride,
    num_outputs,
    num_inputs,
    num_steps,
    part_steps,
    group_size,
    parts: tl.constexpr,
    form: tl.constexpr,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
):
    """Add `parts` parts per program to `out` [grid[1], num_rows, num_outputs]; grid (tiles, any).

    See `PackedCodes` for `codes`, `lookup`, `scales` and `offsets`, and `_sum_steps` for `sums`.
    """
    row, output = tile_of(num_rows, num_outputs, rows, outputs)
    has_row = row < num_rows
    x_rows = x + (row.to(tl.int64) * row_stride)[:, None]
    weight = codes, lookup, scales, offsets, sums
    sizes = num_rows, num_outputs, num_inputs, group_size
    total = tl.zeros([outputs, rows], tl.float32)
    for index in range(parts):
        begin = (tl.program_id(1) * parts + index) * part_steps
        summed = tl.zeros([outputs, rows], tl.float32)
        for step in range(begin, tl.minimum(begin + part_steps, num_steps)):
            summed = _add_step(summed, x_rows, row, has_row, weight, step, output, sizes, form)
        total += summed
    where = (tl.program_id(1).to(tl.int64) * num_rows + row) * num_outputs
    _store_tile(out, total, bias, where, output, output < num_outputs, has_row, has_bias)


@triton.jit(do_not_specialize=["first_output", "num_expanded"])
def expand_codes(
    out,
    codes,
    lookup,
    scales,
    offsets,
    first_output,
    num_expanded,
    num_outputs,
    num_inputs,
    num_groups,
    group_size,
    form: tl.constexpr,
    outputs: tl.constexpr,
):
    """Write weights [E, num_expanded, num_inputs] from `first_output` on, rounded once.

    `codes` and scales are E matrices', as in `multiply_expert_codes`; grid (steps, tiles of outputs, E).
    """
    step = tl.program_id(0)
    matrix = tl.program_id(2).to(tl.int64)
    out += matrix * num_expanded * num_inputs
    codes += matrix * num_outputs * tl.num_programs(0) * (form.inputs * form.bits // 8)
    scales += matrix * num_outputs * num_groups
    offsets += matrix * num_outputs * num_groups
    within = tl.program_id(1) * outputs + tl.arange(0, outputs)
    output = first_output + within
    element: tl.constexpr = out.dtype.element_ty
    values, _ = _values(codes, lookup, step, output, num_outputs, form, element)
    values = values.to(tl.float32)
    group, first = _first_input(step, group_size, form.group_steps, form.inputs)
    has_output = within < num_expanded
    place = group * num_outputs + output
    scale = tl.load(scales + place, mask=has_output, other=0.0).to(tl.float32)
    weight = values * scale[:, None]
    if form.has_offsets:
        weight += tl.load(offsets + place, mask=has_output, other=0.0).to(tl.float32)[:, None]
    column = first + tl.arange(0, form.inputs)
    known = column < tl.minimum(group * group_size + group_size, num_inputs)
    where = within.to(tl.int64)[:, None] * num_inputs + column[None, :]
    tl.store(out + where, weight.to(element), mask=has_output[:, None] & known[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def multiply_expert_codes(
    out,
    x,
    codes,
    lookup,
    scales,
    offsets,
    sums,
    bias,
    order,
    starts,
    num_experts,
    num_rows,
    num_outputs,
    num_inputs,
    num_steps,
    num_groups,
    group_size,
    pairs_per_row: tl.constexpr,
    form: tl.constexpr,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
):
    """As `multiply_experts`, over the codes [E, steps, outputs, bytes of a step] of E experts, in order of the steps.

    `scales` and `offsets` are [E, groups, outputs], `x` has `num_rows` rows, `sums` [steps, num_rows] are theirs.
    """
    expert, tile = tile_of_expert(tl.program_id(0), starts, num_experts, rows)
    if expert >= num_experts:
        return
    start = tl.load(starts + expert)
    count = tl.load(starts + expert + 1) - start
    place = tile * rows + tl.arange(0, rows)
    has_row = place < count
    pair = tl.load(order + start + place, mask=has_row, other=0).to(tl.int64)
    row = pair // pairs_per_row
    output = tl.program_id(1) * outputs + tl.arange(0, outputs)
    own = expert.to(tl.int64) * num_outputs
    codes += own * num_steps * (form.inputs * form.bits // 8)
    scales += own * num_groups
    offsets += own * num_groups
    x_rows = x + (row * num_inputs)[:, None]
    weight = codes, lookup, scales, offsets, sums
    sizes = num_rows, num_outputs, num_inputs, group_size
    total = tl.zeros([outputs, rows], tl.float32)
    for step in range(num_steps):
        total = _add_step(total, x_rows, row, has_row, weight, step, output, sizes, form)
    where = pair * num_outputs
    _store_tile(out, total, bias + own, where, output, output < num_outputs, has_row, has_bias)
