"""Shared parts of the attention kernels: online softmax over chunks of keys, and the spans that keys are split into.

Chunks and spans lie on grids of absolute positions, so they depend neither on the length of a context nor on the batch.
A key that a row does not see has weight 0 and changes no bit; nothing is read past the end of a sequence. Sums of
products are fused explicitly by `fma`, not at the compiler's choice, so that two compilations of the same code give the
same bits.

Online softmax follows Milakov and Gimelshein (2018), and tiling FlashAttention-2 (Dao, 2023). Exponentials have base 2,
and the scale includes the factor log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace_shard.kernels.cuda.triton_codes import INT8, numbers
from millrace_shard.kernels.cuda.triton_linear import dot

SHORT_SPAN = 256
NUM_SHORT_SPANS = 32
MIDDLE_SPAN = 512
NUM_MIDDLE_SPANS = 48
"""Up to 32768 keys there are 80 spans, so that a single query with one KV head occupies most of a GPU."""
LONG_SPAN = 2048
"""Later spans are longer, which bounds the memory for partial results."""
LOG2_E = 1.4426950408889634

_SHORT_SPAN = tl.constexpr(SHORT_SPAN)
_NUM_SHORT_SPANS = tl.constexpr(NUM_SHORT_SPANS)
_MIDDLE_SPAN = tl.constexpr(MIDDLE_SPAN)
_NUM_MIDDLE_SPANS = tl.constexpr(NUM_MIDDLE_SPANS)
_LONG_SPAN = tl.constexpr(LONG_SPAN)
_INT8 = tl.constexpr(INT8)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def span_start(span):
    """The first position of a span, or of each span."""
    short = tl.minimum(span, _NUM_SHORT_SPANS)
    middle = tl.minimum(span - short, _NUM_MIDDLE_SPANS)
    return short * _SHORT_SPAN + middle * _MIDDLE_SPAN + (span - short - middle) * _LONG_SPAN


@triton.jit
def span_of(position):
    """The span that contains a position, or each position."""
    edge = _NUM_SHORT_SPANS * _SHORT_SPAN
    last_edge = edge + _NUM_MIDDLE_SPANS * _MIDDLE_SPAN
    short = tl.minimum(position, edge - 1)
    middle = tl.maximum(tl.minimum(position, last_edge - 1) - edge + _MIDDLE_SPAN, 0)
    beyond = tl.maximum(position - last_edge + _LONG_SPAN, 0)
    return short // _SHORT_SPAN + middle // _MIDDLE_SPAN + beyond // _LONG_SPAN


@triton.jit
def nothing_seen(sinks, heads, live, rows: tl.constexpr, has_sinks: tl.constexpr):
    """Top and total of rows of `heads` that have seen no key; a sink counts as a key without a value."""
    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    if has_sinks:
        top = tl.load(sinks + heads, mask=live, other=0.0) * _LOG2_E
        total += 1.0
    return top, total


@triton.jit
def fold(top, total, out, span_top, span_total, span_out):
    """Combine the results of a span with the results so far; a span without visible keys changes nothing."""
    new_top = tl.maximum(top, span_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    old = tl.exp2(top - shift)
    new = tl.exp2(span_top - shift)
    total = tl.fma(total, old, span_total * new)
    out = tl.fma(out, tl.broadcast_to(old[:, None], out.shape), span_out * new[:, None])
    return new_top, total, out


@triton.jit
def _read(
    pages,
    offsets,
    known,
    head_dim: tl.constexpr,
    masked: tl.constexpr,
    codes: tl.constexpr,
    element: tl.constexpr,
):
    """Keys or values [chunk, padded_dim] or the numbers of their codes, 0 where not `known` and past head_dim."""
    dims = tl.arange(0, triton.next_power_of_2(head_dim))
    pointers = pages + offsets[:, None] + dims[None, :]
    if masked:
        found = tl.load(pointers, mask=known[:, None] & (dims < head_dim)[None, :], other=0.0)
    elif head_dim != triton.next_power_of_2(head_dim):
        found = tl.load(pointers, mask=(dims < head_dim)[None, :], other=0.0)
    else:
        found = tl.load(pointers)
    return numbers(found, codes, element)


@triton.jit
def visit(
    top,
    total,
    out,
    query,
    positions,
    ends,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
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
    codes: tl.constexpr,
    num_kv_heads: tl.constexpr,
    masked: tl.constexpr,
):
    """Update the softmax of `query` with the chunks from `begin` to `end`; unmasked, all rows must see all keys.

    A row sees the keys before its one of `ends`, and with a window only those after its position less the window.
    """
    offsets = tl.arange(0, chunk)
    at = begin + offsets
    # Block numbers are loaded one chunk ahead, so that the loads of keys and values do not wait for their addresses.
    block = tl.load(table + at // page, mask=at < end, other=0)
    for start in range(begin, end, chunk):
        at = start + offsets
        known = at < end
        row = block.to(tl.int64) * page_stride + (at % page) * slot_stride
        scale_row = (block.to(tl.int64) * page + at % page) * num_kv_heads
        block = tl.load(table + (at + chunk) // page, mask=at + chunk < end, other=0)
        keys = _read(key_pages, row, known, head_dim, masked, codes, query.dtype)
        raw = tl.zeros([query.shape[0], chunk], tl.float32)
        raw = dot(query, tl.trans(keys), raw)
        if codes == _INT8:
            raw = raw * tl.load(key_scales + scale_row, mask=known, other=0.0)[None, :]
        factor = scale * _LOG2_E
        if has_cap:
            raw = softcap * (2.0 * tl.sigmoid(raw * (2.0 * scale / softcap)) - 1.0)
            factor = _LOG2_E
        if masked:
            seen = at[None, :] < ends[:, None]
            if has_window:
                seen = seen & (at[None, :] > positions[:, None] - window)
            raw = tl.where(seen, raw, float("-inf"))
        new_top = tl.maximum(top, tl.max(raw, 1) * factor)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tl.fma(raw, factor, tl.broadcast_to(-shift[:, None], raw.shape)))
        carried = tl.exp2(top - shift)
        total = tl.fma(total, carried, tl.sum(weights, 1))
        values = _read(value_pages, row, known, head_dim, masked, codes, query.dtype)
        if codes == _INT8:
            of_values = tl.load(value_scales + scale_row, mask=known, other=0.0)
            if query.dtype == tl.float16:
                # Weights times scales of small values would be subnormal.
                values = (values.to(tl.float32) * of_values[:, None]).to(tl.float16)
            else:
                weights = weights * of_values[None, :]
        out = dot(weights.to(values.dtype), values, out * carried[:, None])
        top = new_top
    return top, total, out
