"""What the attention kernels share: online softmax over chunks of keys, and the spans that keys are split into.

Chunks and spans lie on grids of absolute positions, so that neither depends on the length of a context or on the
batch. A key that a row does not see is an exact identity: its weight is 0, and what lies beyond a sequence's end is
never read. Where two roundings could be fused, they are by `fma`, not by the compiler's choice, so that the same row
gets the same bits from code that was compiled twice.

Online softmax after Milakov and Gimelshein (2018), tiled as in FlashAttention-2 (Dao, 2023). Exponentials are base 2,
the factor log2(e) being part of the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

SHORT_SPAN = 256
NUM_SHORT_SPANS = 32
LONG_SPAN = 2048
"""Spans grow once contexts are long, which bounds the memory for partial results."""

_SHORT_SPAN = tl.constexpr(SHORT_SPAN)
_NUM_SHORT_SPANS = tl.constexpr(NUM_SHORT_SPANS)
_LONG_SPAN = tl.constexpr(LONG_SPAN)
_LOG2_E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(left, right, out, precision: tl.constexpr):
    """`out + left @ right` in float32. The interpreter's numpy has no bfloat16, so it multiplies float32."""
    if _INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, out, input_precision=precision)


@triton.jit
def span_start(span):
    """The first position of a span, or of each."""
    short = tl.minimum(span, _NUM_SHORT_SPANS)
    return short * _SHORT_SPAN + (span - short) * _LONG_SPAN


@triton.jit
def span_of(position):
    """The span that a position lies in, or that each does."""
    edge = _NUM_SHORT_SPANS * _SHORT_SPAN
    short = tl.minimum(position, edge - 1)
    beyond = tl.maximum(position - edge + _LONG_SPAN, 0)
    return short // _SHORT_SPAN + beyond // _LONG_SPAN


@triton.jit
def fold(top, total, out, span_top, span_total, span_out):
    """Results over more keys added to those so far; a span of no visible key changes nothing."""
    new_top = tl.maximum(top, span_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    old = tl.exp2(top - shift)
    new = tl.exp2(span_top - shift)
    total = tl.fma(total, old, span_total * new)
    out = tl.fma(out, tl.broadcast_to(old[:, None], out.shape), span_out * new[:, None])
    return new_top, total, out


@triton.jit
def _read(pages, offsets, known, head_dim: tl.constexpr, masked: tl.constexpr):
    """[chunk, padded_dim] of keys or values, 0 where not `known` and beyond head_dim."""
    dims = tl.arange(0, triton.next_power_of_2(head_dim))
    pointers = pages + offsets[:, None] + dims[None, :]
    if masked:
        found = tl.load(pointers, mask=known[:, None] & (dims < head_dim)[None, :], other=0.0)
    elif head_dim != triton.next_power_of_2(head_dim):
        found = tl.load(pointers, mask=(dims < head_dim)[None, :], other=0.0)
    else:
        found = tl.load(pointers)
    return found


@triton.jit
def visit(
    top,
    total,
    out,
    query,
    positions,
    key_pages,
    value_pages,
    table,
    begin,
    end,
    page_stride,
    slot_stride,
    scale,
    softcap,
    window,
    head_dim: tl.constexpr,
    page: tl.constexpr,
    chunk: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    precision: tl.constexpr,
    masked: tl.constexpr,
):
    """Carry the softmax of `query` over the chunks from `begin` to `end`; unmasked, all rows see all of them."""
    offsets = tl.arange(0, chunk)
    at = begin + offsets
    # One chunk ahead, so that the loads of keys and values do not wait for a load of their addresses.
    block = tl.load(table + at // page, mask=at < end, other=0)
    for start in range(begin, end, chunk):
        at = start + offsets
        known = at < end
        row = block.to(tl.int64) * page_stride + (at % page) * slot_stride
        block = tl.load(table + (at + chunk) // page, mask=at + chunk < end, other=0)
        keys = _read(key_pages, row, known, head_dim, masked)
        raw = tl.zeros([query.shape[0], chunk], tl.float32)
        raw = dot(query, tl.trans(keys), raw, precision)
        factor = scale * _LOG2_E
        if has_cap:
            raw = softcap * (2.0 * tl.sigmoid(raw * (2.0 * scale / softcap)) - 1.0)
            factor = _LOG2_E
        if masked:
            seen = at[None, :] <= positions[:, None]
            if has_window:
                seen = seen & (at[None, :] > positions[:, None] - window)
            raw = tl.where(seen, raw, float("-inf"))
        new_top = tl.maximum(top, tl.max(raw, 1) * factor)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tl.fma(raw, factor, tl.broadcast_to(-shift[:, None], raw.shape)))
        carried = tl.exp2(top - shift)
        total = tl.fma(total, carried, tl.sum(weights, 1))
        values = _read(value_pages, row, known, head_dim, masked)
        out = dot(weights.to(values.dtype), values, out * carried[:, None], precision)
        top = new_top
    return top, total, out
