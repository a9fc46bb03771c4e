"""Triton kernels of experts: products of the rows of each expert, gates of gpt-oss, and the sum of a token's experts.

An output is one sum over its inputs in order, and a token's experts are added in the order of its choice, so a row's
bits depend only on the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace_shard.kernels.cuda.triton_linear import dot

_EXPERTS_PER_LOOK = tl.constexpr(128)


@triton.jit
def tile_of_expert(number, starts, num_experts, rows: tl.constexpr):
    """The expert of a tile, and the place of the tile among the expert's tiles; no expert for further numbers.

    Tiles are numbered by expert, so that an expert without pairs has none.
    """
    expert, first, last = 0, 0, 0
    lanes = tl.arange(0, _EXPERTS_PER_LOOK)
    for base in range(0, num_experts, _EXPERTS_PER_LOOK):
        each = base + lanes
        exists = each < num_experts
        start = tl.load(starts + each, mask=exists, other=0)
        count = tl.load(starts + each + 1, mask=exists, other=0) - start
        ends = last + tl.cumsum((count + rows - 1) // rows, 0)
        is_before = exists & (ends <= number)
        expert += tl.sum(is_before.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(is_before, ends, 0), 0))
        last = tl.max(ends, 0)
    return expert, number - first


@triton.jit(do_not_specialize=["num_experts"])
def multiply_experts(
    out,
    x,
    weight,
    bias,
    order,
    starts,
    num_experts,
    num_outputs,
    num_inputs,
    pairs_per_row: tl.constexpr,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """`out` [pairs, outputs] = `weight` [E, outputs, inputs] of its expert x row `pair // pairs_per_row` of `x`.

    Grid (at least as many as there are tiles of `rows` pairs of one expert, tiles of outputs).
    """
    expert, tile = tile_of_expert(tl.program_id(0), starts, num_experts, rows)
    if expert >= num_experts:
        return
    start = tl.load(starts + expert)
    count = tl.load(starts + expert + 1) - start
    place = tile * rows + tl.arange(0, rows)
    given = place < count
    pair = tl.load(order + start + place, mask=given, other=0).to(tl.int64)
    output = tl.program_id(1) * outputs + tl.arange(0, outputs)
    wanted = (output < num_outputs)[:, None]
    x_rows = x + (pair // pairs_per_row * num_inputs)[:, None]
    own = expert.to(tl.int64) * num_outputs
    weight_rows = weight + ((own + output) * num_inputs)[:, None]
    at = tl.arange(0, inputs)
    total = tl.zeros([outputs, rows], tl.float32)
    for begin in range(0, num_inputs, inputs):
        known = (begin + at < num_inputs)[None, :]
        left = tl.load(weight_rows + (begin + at)[None, :], mask=wanted & known, other=0.0)
        right = tl.load(x_rows + (begin + at)[None, :], mask=given[:, None] & known, other=0.0)
        total = dot(left, tl.trans(right), total)
    if has_bias:
        added = tl.load(bias + own + output, mask=output < num_outputs, other=0.0)
        total += added.to(tl.float32)[:, None]
    where = (pair * num_outputs)[None, :] + output[:, None]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=wanted & given[None, :])


@triton.jit
def clamped_swiglu(out, gate_up, alpha, limit, width, columns: tl.constexpr):
    """`ClampedSwiglu` of `gate_up` [pairs, 2 * width], gates first: [pairs, width]; grid (pairs, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    mask = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    # Comparisons, since the functions for minimum and maximum may lose NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    gated = (up + 1.0) * (gate * tl.sigmoid(gate * alpha))
    tl.store(out + row * width + column, gated.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_experts(out, results, shares, width, top_k: tl.constexpr, columns: tl.constexpr):
    """The sum in float32 of `results` [T * K, width] times `shares` [T, K]: [T, width]; grid (T, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    mask = column < width
    total = tl.zeros([columns], tl.float32)
    for rank in range(top_k):
        pair = row * top_k + rank
        share = tl.load(shares + pair)
        result = tl.load(results + pair * width + column, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(result, tl.broadcast_to(share, total.shape), total)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=mask)
