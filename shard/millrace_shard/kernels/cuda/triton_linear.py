"""A linear whose rows do not depend on the number of rows: one tiling per layer, and one order over the inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_TILES_PER_GROUP = tl.constexpr(8)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    out,
    x,
    weight,
    bias,
    num_rows,
    row_stride,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """`out = x @ weight.T + bias`; programs that share weights run close together."""
    row_tiles = tl.cdiv(num_rows, rows)
    output_tiles: tl.constexpr = (num_outputs + outputs - 1) // outputs
    tile = tl.program_id(0)
    first = tile // (_TILES_PER_GROUP * output_tiles) * _TILES_PER_GROUP
    height = tl.minimum(row_tiles - first, _TILES_PER_GROUP)
    within = tile % (_TILES_PER_GROUP * output_tiles)
    row = (first + within % height) * rows + tl.arange(0, rows)
    output = within // height * outputs + tl.arange(0, outputs)
    given = (row < num_rows)[:, None]
    wanted = (output < num_outputs)[:, None]
    at = tl.arange(0, inputs)
    x_rows = x + (row.to(tl.int64) * row_stride)[:, None]
    weight_rows = weight + (output.to(tl.int64) * num_inputs)[:, None]
    product = tl.zeros([rows, outputs], tl.float32)
    for start in range(0, num_inputs, inputs):
        column = (start + at)[None, :]
        left = tl.load(x_rows + column, mask=given & (column < num_inputs), other=0.0)
        right = tl.load(weight_rows + column, mask=wanted & (column < num_inputs), other=0.0)
        if _INTERPRETED:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        product = tl.dot(left, tl.trans(right), product, input_precision="ieee")
    if has_bias:
        added = tl.load(bias + output, mask=output < num_outputs, other=0.0)
        product += added.to(tl.float32)[None, :]
    where = (row.to(tl.int64) * num_outputs)[:, None] + output[None, :]
    mask = given & (output < num_outputs)[None, :]
    tl.store(out + where, product.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class _Tiling:
    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


_TENSOR_CORES = _Tiling(rows=64, outputs=64, inputs=64, num_warps=4, num_stages=4)
_FLOAT32 = _Tiling(rows=32, outputs=32, inputs=32, num_warps=4, num_stages=2)


class FixedTileLinear:
    """`F.linear` with the same tiles, in the same order, for any number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias
        self._tiling = _FLOAT32 if weight.dtype == torch.float32 else _TENSOR_CORES

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, tiling = x.shape[0], self._tiling
        num_outputs, num_inputs = self._weight.shape
        out = x.new_empty(num_rows, num_outputs)
        num_tiles = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_outputs, tiling.outputs)
        if num_tiles:
            _multiply[(num_tiles,)](
                out,
                x,
                self._weight,
                self._weight if self._bias is None else self._bias,
                num_rows,
                x.stride(0),
                num_outputs=num_outputs,
                num_inputs=num_inputs,
                has_bias=self._bias is not None,
                rows=tiling.rows,
                outputs=tiling.outputs,
                inputs=tiling.inputs,
                num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
            )
        return out
