"""A linear whose rows have the same bits for any number of rows.

An output is the sum of its parts in order, and a part is the sum over its inputs in order. Parts follow from the shape
of the layer (`linear_tilings`). With few rows each part has its own program and a second kernel adds the parts;
with many rows one program computes and adds them all.

Products are `weight @ x.T`, so that the outputs are the long side of the tensor cores' instruction, and the number of
rows changes only its short side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from millrace_shard.kernels.cuda.linear_tilings import (
    MANY_ROWS,
    part_length,
    row_tiling,
)

COLUMNS = 1024
"""Outputs per program that adds parts."""

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_TILES_PER_GROUP = tl.constexpr(8)


@triton.jit
def tile_of(num_rows, num_outputs, rows: tl.constexpr, outputs: tl.constexpr):
    """The rows [rows] and outputs [outputs] of a program, whose id is on axis 0; those that share weights are close."""
    row_tiles = tl.cdiv(num_rows, rows)
    output_tiles = tl.cdiv(num_outputs, outputs)
    tile = tl.program_id(0)
    first = tile // (_TILES_PER_GROUP * output_tiles) * _TILES_PER_GROUP
    height = tl.minimum(row_tiles - first, _TILES_PER_GROUP)
    within = tile % (_TILES_PER_GROUP * output_tiles)
    row = (first + within % height) * rows + tl.arange(0, rows)
    output = within // height * outputs + tl.arange(0, outputs)
    return row, output


@triton.jit
def dot(left, right, total):
    """`total` + `left` [m, k] @ `right` [k, n], in float32."""
    if _INTERPRETED:
        # numpy has no bfloat16, and the sums in its products depend on the shapes, on some CPUs on the row, too.
        pairs = left.to(tl.float32)[:, :, None] * right.to(tl.float32)[None, :, :]
        total += tl.sum(pairs, 1)
    else:
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    out,
    x,
    weight,
    bias,
    num_rows,
    row_stride,
    num_outputs,
    num_inputs,
    part,
    parts: tl.constexpr,
    has_bias: tl.constexpr,
    whole_blocks: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """Add `parts` parts per program to `out` [grid[1], num_rows, num_outputs]; grid (tiles, any).

    With `whole_blocks`, `num_inputs` is a multiple of `inputs`.
    """
    row, output = tile_of(num_rows, num_outputs, rows, outputs)
    given = (row < num_rows)[:, None]
    wanted = (output < num_outputs)[:, None]
    at = tl.arange(0, inputs)
    x_rows = x + (row.to(tl.int64) * row_stride)[:, None]
    weight_rows = weight + (output.to(tl.int64) * num_inputs)[:, None]
    total = tl.zeros([outputs, rows], tl.float32)
    for index in range(parts):
        begin = (tl.program_id(1) * parts + index) * part
        product = tl.zeros([outputs, rows], tl.float32)
        for start in range(begin, tl.minimum(begin + part, num_inputs), inputs):
            column = (start + at)[None, :]
            if whole_blocks:
                left = tl.load(weight_rows + column, mask=wanted, other=0.0)
                right = tl.load(x_rows + column, mask=given, other=0.0)
            else:
                known = column < num_inputs
                left = tl.load(weight_rows + column, mask=wanted & known, other=0.0)
                right = tl.load(x_rows + column, mask=given & known, other=0.0)
            product = dot(left, tl.trans(right), product)
        total += product
    if has_bias:
        added = tl.load(bias + output, mask=output < num_outputs, other=0.0)
        total += added.to(tl.float32)[:, None]
    where = (tl.program_id(1).to(tl.int64) * num_rows + row) * num_outputs
    mask = wanted & (row < num_rows)[None, :]
    tl.store(out + where[None, :] + output[:, None], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts(
    out,
    partials,
    bias,
    num_rows,
    num_outputs,
    parts: tl.constexpr,
    has_bias: tl.constexpr,
    columns: tl.constexpr,
):
    """Add `partials` [parts, num_rows, num_outputs] in order to `out`; grid (num_rows, blocks of `columns`)."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * columns + tl.arange(0, columns)
    mask = output < num_outputs
    total = tl.load(partials + row * num_outputs + output, mask=mask, other=0.0).to(tl.float32)
    for index in tl.static_range(1, parts):
        where = (index * num_rows + row) * num_outputs + output
        total += tl.load(partials + where, mask=mask, other=0.0).to(tl.float32)
    if has_bias:
        total += tl.load(bias + output, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + output, total.to(out.dtype.element_ty), mask=mask)


def add_parts(out: Tensor, partials: Tensor, bias: Tensor | None) -> None:
    """Overwrite `out` [rows, outputs] with the sum of `partials` [parts, rows, outputs] in order, and `bias`."""
    num_parts, num_rows, num_outputs = partials.shape
    _add_parts[(num_rows, triton.cdiv(num_outputs, COLUMNS))](
        out,
        partials,
        partials if bias is None else bias,
        num_rows,
        num_outputs,
        parts=num_parts,
        has_bias=bias is not None,
        columns=COLUMNS,
        num_warps=4,
    )


def sum_ranks(parts: Tensor) -> Tensor:
    """`sum_in_order` of `parts` [ranks, …, n], floats of at most 32 bits, in one launch."""
    out = parts.new_empty(parts.shape[1:])
    if out.numel():
        add_parts(out.view(-1, out.shape[-1]), parts.view(len(parts), -1, out.shape[-1]), None)
    return out


class FixedOrderLinear:
    """`F.linear` that adds the products of an output in the same order for any number of rows."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None
    ) -> None:
        """Keep `weight` [out, in] and `bias` [out]; results have `out_dtype`, by default the weight's."""
        self._weight = weight.contiguous()
        self._bias = bias
        self._out_dtype = out_dtype or weight.dtype
        self._part = part_length(*weight.shape)
        self._num_parts = max(1, triton.cdiv(weight.shape[1], self._part))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        num_rows, num_outputs = x.shape[0], self._weight.shape[0]
        out = x.new_empty(num_rows, num_outputs, dtype=self._out_dtype)
        if num_rows == 0:
            return out
        if self._num_parts == 1 or num_rows >= MANY_ROWS:
            self._launch(out, x, num_programs=1, bias=self._bias)
            return out
        partials = x.new_empty(self._num_parts, num_rows, num_outputs, dtype=torch.float32)
        self._launch(partials, x, num_programs=self._num_parts, bias=None)
        add_parts(out, partials, self._bias)
        return out

    def _launch(self, out: Tensor, x: Tensor, *, num_programs: int, bias: Tensor | None) -> None:
        """Multiply, with the parts shared by `num_programs` programs per tile."""
        if x.stride(1) != 1:
            x = x.contiguous()
        num_outputs, num_inputs = self._weight.shape
        tiling = row_tiling(x.dtype, x.shape[0], has_one_sum=self._num_parts == 1)
        num_tiles = triton.cdiv(x.shape[0], tiling.rows) * triton.cdiv(num_outputs, tiling.outputs)
        _multiply[(num_tiles, num_programs)](
            out,
            x,
            self._weight,
            self._weight if bias is None else bias,
            x.shape[0],
            x.stride(0),
            num_outputs,
            num_inputs,
            self._part,
            parts=self._num_parts // num_programs,
            has_bias=bias is not None,
            whole_blocks=num_inputs % tiling.inputs == 0,
            rows=tiling.rows,
            outputs=tiling.outputs,
            inputs=tiling.inputs,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
