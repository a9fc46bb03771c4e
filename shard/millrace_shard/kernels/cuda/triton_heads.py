"""A linear for each head by one Triton kernel, whose rows have the same bits for any number of rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace_shard.kernels.cuda.linear_tilings import row_tiling
from millrace_shard.kernels.cuda.triton_linear import dot, tile_of


@triton.jit(do_not_specialize=["num_rows"])
def multiply_heads(
    out,
    x,
    weight,
    num_rows,
    row_stride,
    head_stride,
    out_row_stride,
    out_head_stride,
    num_outputs,
    num_inputs,
    whole_blocks: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """Multiply `x` [num_rows, heads, num_inputs] by `weight` [heads, num_outputs, num_inputs]; grid (tiles, heads).

    Products are added in order. With `whole_blocks`, `num_inputs` is a multiple of `inputs`.
    """
    head = tl.program_id(1).to(tl.int64)
    row, output = tile_of(num_rows, num_outputs, rows, outputs)
    given = (row < num_rows)[:, None]
    wanted = (output < num_outputs)[:, None]
    at = tl.arange(0, inputs)
    x_rows = x + head * head_stride + (row.to(tl.int64) * row_stride)[:, None]
    weight_rows = weight + (head * num_outputs + output)[:, None] * num_inputs
    total = tl.zeros([outputs, rows], tl.float32)
    for start in range(0, num_inputs, inputs):
        column = (start + at)[None, :]
        if whole_blocks:
            left = tl.load(weight_rows + column, mask=wanted, other=0.0)
            right = tl.load(x_rows + column, mask=given, other=0.0)
        else:
            known = column < num_inputs
            left = tl.load(weight_rows + column, mask=wanted & known, other=0.0)
            right = tl.load(x_rows + column, mask=given & known, other=0.0)
        total = dot(left, tl.trans(right), total)
    where = head * out_head_stride + row.to(tl.int64) * out_row_stride
    mask = wanted & (row < num_rows)[None, :]
    tl.store(out + where[None, :] + output[:, None], total.to(out.dtype.element_ty), mask=mask)


class LinearOfHeads:
    """Linears of all heads in one launch."""

    def __init__(self, weight: Tensor) -> None:
        """Keep `weight` [heads, out, in]."""
        self._weight = weight.contiguous()

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the results of `x` [T, heads, in] to `out` [T, heads, out], whose last axes are contiguous."""
        num_heads, num_outputs, num_inputs = self._weight.shape
        if not len(x):
            return
        tiling = row_tiling(x.dtype, len(x), has_one_sum=True)
        num_tiles = triton.cdiv(len(x), tiling.rows) * triton.cdiv(num_outputs, tiling.outputs)
        multiply_heads[(num_tiles, num_heads)](
            out,
            x,
            self._weight,
            len(x),
            *x.stride()[:2],
            *out.stride()[:2],
            num_outputs,
            num_inputs,
            whole_blocks=num_inputs % tiling.inputs == 0,
            rows=tiling.rows,
            outputs=tiling.outputs,
            inputs=tiling.inputs,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
