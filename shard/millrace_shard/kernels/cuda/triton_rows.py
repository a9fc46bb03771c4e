"""Triton kernels over rows: norms and the activation. A row's arithmetic depends only on its width.

Rounding is the same as in `plain`: norms are computed in float32, cast, then scaled; activations are cast,
then multiplied.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_shard.kernels.layer_weights import NormWeights

NORM_ELEMENTS = 1024
"""Elements per program, for narrow rows."""
ACTIVATION_ELEMENTS = 1024
_GELU_SCALE = tl.constexpr(2 * math.sqrt(2 / math.pi))
_GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def scaled_by(normed, weight, dtype: tl.constexpr, plus_one: tl.constexpr, wide: tl.constexpr):
    """`normed` float32 times `weight` with the flags of `NormWeights`, float32 before the last rounding."""
    if wide:
        scale = weight.to(tl.float32)
        if plus_one:
            scale += 1.0
        return normed * scale
    if plus_one:
        weight = (weight.to(tl.float32) + 1.0).to(weight.dtype)
    return normed.to(dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _normalise(
    x,
    weight,
    width: tl.constexpr,
    eps,
    dtype: tl.constexpr,
    centred: tl.constexpr,
    plus_one: tl.constexpr,
    wide: tl.constexpr,
):
    """Normalise `x` [rows, padded width] float32, which is 0 past `width`, with the flags of `NormWeights`."""
    if centred:
        inside = (tl.arange(0, x.shape[1]) < width)[None, :]
        x = tl.where(inside, x - (tl.sum(x, 1) / width)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    return scaled_by(x * scale[:, None], weight, dtype, plus_one, wide)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    out,
    x,
    weight,
    eps,
    num_rows,
    outer_stride,
    inner_stride,
    inner_rows: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    centred: tl.constexpr,
    plus_one: tl.constexpr,
    wide: tl.constexpr,
    by_head: tl.constexpr,
):
    """With `by_head`, `weight` is [inner_rows, width], else [width]."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, triton.next_power_of_2(width))
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    outer = (row // inner_rows).to(tl.int64) * outer_stride
    where = outer + (row % inner_rows) * inner_stride
    rows_of = tl.load(x + where[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if by_head:
        of_head = weight + (row % inner_rows * width)[:, None] + column[None, :]
        scales = tl.load(of_head, mask=mask, other=0.0)
    else:
        scales = tl.load(weight + column, mask=column < width, other=0.0)[None, :]
    normed = _normalise(rows_of, scales, width, eps, x.dtype.element_ty, centred, plus_one, wide)
    where = row.to(tl.int64) * width
    tl.store(out + where[:, None] + column[None, :], normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm(
    out,
    x,
    residual,
    weight,
    eps,
    width: tl.constexpr,
    centred: tl.constexpr,
    plus_one: tl.constexpr,
    wide: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.arange(0, triton.next_power_of_2(width))
    mask = (column < width)[None, :]
    where = (row.to(tl.int64) * width)[:, None] + column[None, :]
    added = tl.load(x + where, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(residual + where, mask=mask, other=0.0).to(tl.float32)
    rounded = added.to(residual.dtype.element_ty)
    tl.store(residual + where, rounded, mask=mask)
    scales = tl.load(weight + column, mask=column < width, other=0.0)[None, :]
    element: tl.constexpr = residual.dtype.element_ty
    again = rounded.to(tl.float32)
    normed = _normalise(again, scales, width, eps, element, centred, plus_one, wide)
    tl.store(out + where, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated(
    out, gate_up, row_stride, width: tl.constexpr, columns: tl.constexpr, is_gelu: tl.constexpr
):
    """`activation(gate) * up`: SiLU, or GELU by its tanh approximation."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    mask = column < width
    gate = tl.load(gate_up + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + column, mask=mask, other=0.0)
    if is_gelu:
        # tanh(z) is 2 sigmoid(2 z) - 1, so half of 1 + tanh(z) is sigmoid(2 z).
        inner = gate * (gate * gate * _GELU_CUBE + 1.0)
        activated = gate * tl.sigmoid(inner * _GELU_SCALE)
    else:
        activated = gate * tl.sigmoid(gate)
    activated = activated.to(up.dtype).to(tl.float32)
    product = activated * up.to(tl.float32)
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, norm: NormWeights) -> Tensor:
    """See Kernels. `x` [A, B, width] may be a strided view, such as the heads of a merged projection.

    A weight of each head, [B, width], is for such an `x`.
    """
    weight, width = norm.weight, x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    source = x if x.dim() == 3 and x.stride(2) == 1 else x.reshape(-1, 1, width)
    num_rows = source.shape[0] * source.shape[1]
    if num_rows == 0:
        return out
    padded = triton.next_power_of_2(width)
    rows = max(1, NORM_ELEMENTS // padded)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        out,
        source,
        weight,
        norm.eps,
        num_rows,
        *source.stride()[:2],
        inner_rows=source.shape[1],
        width=width,
        rows=rows,
        by_head=weight.dim() > 1,
        **_flags(norm),
        num_warps=_num_warps(padded * rows),
    )
    return out


def _flags(norm: NormWeights) -> dict[str, bool]:
    return {"centred": norm.centred, "plus_one": norm.plus_one, "wide": norm.wide}


def add_rms_norm(x: Tensor, residual: Tensor, norm: NormWeights) -> Tensor:
    """See Kernels. Raises ValueError if `residual` [T, hidden], which is written in place, is not contiguous."""
    if not residual.is_contiguous():
        raise ValueError("a residual that is updated in place must be contiguous")
    out = torch.empty_like(residual)
    num_rows, width = residual.shape
    if num_rows:
        num_warps = _num_warps(triton.next_power_of_2(width))
        _add_rms_norm[(num_rows,)](
            out,
            x.contiguous(),
            residual,
            norm.weight,
            norm.eps,
            width=width,
            **_flags(norm),
            num_warps=num_warps,
        )
    return out


def gate_mul(gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
    """See `silu_mul` and `gelu_mul` of Kernels. `gate_up` [T, 2 * inter] may have any row stride."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if num_rows:
        _gated[(num_rows, triton.cdiv(width, ACTIVATION_ELEMENTS))](
            out,
            gate_up,
            gate_up.stride(0),
            width=width,
            columns=ACTIVATION_ELEMENTS,
            is_gelu=is_gelu,
            num_warps=4,
        )
    return out


def _num_warps(num_elements: int) -> int:
    """The number of warps of a program over `num_elements`: about 16 elements per thread, and at most 16 warps."""
    return min(16, max(1, num_elements // 512))
