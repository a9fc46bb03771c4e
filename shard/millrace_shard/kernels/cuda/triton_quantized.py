"""Products of rows with packed codes, whose bits for a row are the same for any number of rows.

Codes are multiplied as they are: what they stand for is exact in the dtype of the model, or is the sum of two numbers
of that dtype. The products of a step are added in float32, the sum is multiplied with the scale of its group, and the
results are added in the order of the steps, in parts that follow from the shape of the layer, as in `triton_linear`.
An offset is multiplied with the sum of the inputs of the step, which `_sum_steps` takes beforehand, row by row.

Products with scales are fused explicitly, as in `triton_softmax`: two compilations of the same code give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace_shard.kernels.cuda.triton_linear import dot, tile_of


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
    given,
    step,
    group_size,
    num_inputs,
    whole_steps: tl.constexpr,
    group_steps: tl.constexpr,
    inputs: tl.constexpr,
):
    """The inputs [m, inputs] of `step` for `rows` [m, 1] of pointers; 0 past the end of the group."""
    group, first = _first_input(step, group_size, group_steps, inputs)
    column = first + tl.arange(0, inputs)
    if whole_steps:
        return tl.load(rows + column[None, :], mask=given, other=0.0)
    end = tl.minimum(group * group_size + group_size, num_inputs)
    return tl.load(rows + column[None, :], mask=given & (column < end)[None, :], other=0.0)


@triton.jit
def _values(
    codes,
    lookup,
    step,
    output,
    num_outputs,
    bits: tl.constexpr,
    least: tl.constexpr,
    has_lookup: tl.constexpr,
    inputs: tl.constexpr,
):
    """The values of the codes of `step` for `output`s [n]: [n, inputs] float32."""
    step_bytes: tl.constexpr = inputs * bits // 8
    place = (step * num_outputs + output).to(tl.int64) * step_bytes
    at = tl.arange(0, step_bytes)
    found = tl.load(
        codes + place[:, None] + at[None, :], mask=(output < num_outputs)[:, None], other=0
    )
    if bits == 4:
        found = tl.join(found & 15, found >> 4).reshape(output.shape[0], inputs)
    found = found.to(tl.int32)
    if has_lookup:
        # The pipeliner would take indirect loads from memory for tiles, and keep their results in shared memory.
        table = tl.load(lookup + tl.arange(0, 1 << bits))
        flat = tl.gather(table, found.reshape(output.shape[0] * inputs), 0)
        return flat.reshape(output.shape[0], inputs)
    return (found + least).to(tl.float32)


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
    found = tl.load(x + row.to(tl.int64) * row_stride + column, mask=known, other=0.0)
    total = tl.sum(found.to(tl.float32), 1)
    tl.store(sums + step * num_rows + row, total, mask=step < num_steps)


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
    bits: tl.constexpr,
    least: tl.constexpr,
    has_lookup: tl.constexpr,
    has_remainder: tl.constexpr,
    has_offsets: tl.constexpr,
    has_bias: tl.constexpr,
    whole_steps: tl.constexpr,
    group_steps: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """Add `parts` parts per program to `out` [grid[1], num_rows, num_outputs]; grid (tiles, any).

    See `PackedCodes` for `codes`, `scales`, `offsets` and `group_steps`, and `_sum_steps` for `sums`.
    """
    row, output = tile_of(num_rows, num_outputs, rows, outputs)
    given = row < num_rows
    wanted = output < num_outputs
    x_rows = x + (row.to(tl.int64) * row_stride)[:, None]
    total = tl.zeros([outputs, rows], tl.float32)
    for index in range(parts):
        begin = (tl.program_id(1) * parts + index) * part_steps
        summed = tl.zeros([outputs, rows], tl.float32)
        for step in range(begin, tl.minimum(begin + part_steps, num_steps)):
            right = _inputs(
                x_rows,
                given[:, None],
                step,
                group_size,
                num_inputs,
                whole_steps,
                group_steps,
                inputs,
            )
            right = tl.trans(right)
            left = _values(
                codes, lookup, step, output, num_outputs, bits, least, has_lookup, inputs
            )
            rounded = left.to(x.dtype.element_ty)
            product = dot(rounded, right, tl.zeros([outputs, rows], tl.float32))
            if has_remainder:
                product = dot(
                    (left - rounded.to(tl.float32)).to(x.dtype.element_ty), right, product
                )
            group, _ = _first_input(step, group_size, group_steps, inputs)
            place = group * num_outputs + output
            scale = tl.load(scales + place, mask=wanted, other=0.0).to(tl.float32)
            summed = tl.fma(product, tl.broadcast_to(scale[:, None], summed.shape), summed)
            if has_offsets:
                offset = tl.load(offsets + place, mask=wanted, other=0.0).to(tl.float32)
                of_rows = tl.load(sums + step * num_rows + row, mask=given, other=0.0)
                offset = tl.broadcast_to(offset[:, None], summed.shape)
                summed = tl.fma(offset, tl.broadcast_to(of_rows[None, :], summed.shape), summed)
        total += summed
    if has_bias:
        total += tl.load(bias + output, mask=wanted, other=0.0).to(tl.float32)[:, None]
    where = (tl.program_id(1).to(tl.int64) * num_rows + row) * num_outputs
    mask = wanted[:, None] & given[None, :]
    tl.store(out + where[None, :] + output[:, None], total.to(out.dtype.element_ty), mask=mask)
