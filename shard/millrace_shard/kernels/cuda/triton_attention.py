"""Triton kernels of ragged paged attention: tiles of queries, and single queries split over spans of keys.

T tokens, B sequences, H query heads, K key-value heads, `group` = H / K; the rows of a tile are tokens x group. The
split over keys follows Flash-Decoding (Dao et al., 2023), with spans at fixed positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace_shard.kernels.cuda.triton_codes import scaled
from millrace_shard.kernels.cuda.triton_softmax import (
    fold,
    nothing_seen,
    span_of,
    span_start,
    visit,
)

_SEQUENCES_PER_LOOK = tl.constexpr(128)
_SPANS_PER_READ = tl.constexpr(8)


@triton.jit
def sequence_of(
    slot, starts, num_sequences, tokens_per_tile: tl.constexpr, heads: tl.constexpr = 1
):
    """The sequence of a tile slot; slots from `starts[b] // tokens_per_tile + b` on are for the tiles of sequence b.

    With `heads`, a tile has so many pairs of a token and one of its heads.
    """
    num_begun = 0
    lanes = tl.arange(0, _SEQUENCES_PER_LOOK)
    for base in range(0, num_sequences, _SEQUENCES_PER_LOOK):
        sequence = base + lanes
        exists = sequence < num_sequences
        start = tl.load(starts + sequence, mask=exists, other=0)
        begun = exists & (start * heads // tokens_per_tile + sequence <= slot)
        num_begun += tl.sum(begun.to(tl.int32), 0)
    return num_begun - 1


@triton.jit(
    do_not_specialize=["window", "num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["tables", "starts", "contexts", "key_ends"],
)
def attend_tiles(
    attended,
    queries,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    tables,
    starts,
    contexts,
    scale,
    softcap,
    window,
    sinks,
    key_ends,
    num_sequences,
    table_stride,
    token_stride,
    head_stride,
    page_stride,
    slot_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
    has_ends: tl.constexpr,
    in_spans: tl.constexpr,
    codes: tl.constexpr,
):
    """Attend sequences of several queries, one tile and key-value head per program; grid (tile slots, K).

    Late tiles, which see most keys, run first. With `in_spans`, results are folded by spans, as for single queries.
    """
    tokens_per_tile: tl.constexpr = rows // group
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = sequence_of(slot, starts, num_sequences, tokens_per_tile)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    first = (slot - start // tokens_per_tile - sequence) * tokens_per_tile
    if (first >= count) | (count == 1):
        return
    context = tl.load(contexts + sequence)
    row = tl.arange(0, rows)
    token = first + row // group
    live = (token < count) & (row < tokens_per_tile * group)
    positions = context - count + token
    heads = head * group + row % group
    dims = tl.arange(0, triton.next_power_of_2(head_dim))
    mask = live[:, None] & (dims < head_dim)[None, :]
    tokens = (start + token).to(tl.int64)
    where = tokens * token_stride + heads * head_stride
    query = tl.load(queries + where[:, None] + dims[None, :], mask=mask, other=0.0)

    key_pages, value_pages = key_pages + head * head_dim, value_pages + head * head_dim
    scale = scaled(scale, key_scales, codes)
    table = tables + sequence.to(tl.int64) * table_stride
    first_position = context - count + first
    ends = tl.load(key_ends + tokens, mask=live, other=0) if has_ends else positions + 1
    end = tl.max(ends, 0) if has_ends else tl.minimum(context, first_position + tokens_per_tile)
    begin = 0
    if has_window:
        begin = tl.maximum(first_position - window + 1, 0) // chunk * chunk
    # Every row of the tile sees every key before this position.
    common = begin if has_window else (first_position + 1) // chunk * chunk
    top, total = nothing_seen(sinks, heads, live, rows, has_sinks)
    out = tl.zeros([rows, dims.shape[0]], tl.float32)
    if in_spans:
        for span in range(span_of(begin), span_of(end - 1) + 1):
            span_begin = tl.maximum(span_start(span), begin)
            span_end = tl.minimum(span_start(span + 1), end)
            span_top = tl.full([rows], float("-inf"), tl.float32)
            span_total = tl.zeros([rows], tl.float32)
            span_out = tl.zeros([rows, dims.shape[0]], tl.float32)
            if not has_window:
                span_top, span_total, span_out = visit(
                    span_top, span_total, span_out, query, positions, ends, key_pages, value_pages,
                    key_scales + head, value_scales + head, table,
                    span_begin, tl.minimum(span_end, common), page_stride, slot_stride,
                    scale, softcap, window, head_dim, page, chunk, has_window, has_cap,
                    codes, num_heads // group,
                    masked=False,
                )  # fmt: skip
            span_top, span_total, span_out = visit(
                span_top, span_total, span_out, query, positions, ends, key_pages, value_pages,
                key_scales + head, value_scales + head, table,
                tl.maximum(span_begin, common), span_end, page_stride, slot_stride,
                scale, softcap, window, head_dim, page, chunk, has_window, has_cap,
                codes, num_heads // group,
                masked=True,
            )  # fmt: skip
            top, total, out = fold(
                top, total, out, span_top, span_total, scaled(span_out, value_scales, codes)
            )
    else:
        if not has_window:
            top, total, out = visit(
                top, total, out, query, positions, ends, key_pages, value_pages,
                key_scales + head, value_scales + head, table,
                begin, common, page_stride, slot_stride,
                scale, softcap, window, head_dim, page, chunk, has_window, has_cap,
                codes, num_heads // group,
                masked=False,
            )  # fmt: skip
        top, total, out = visit(
            top, total, out, query, positions, ends, key_pages, value_pages,
            key_scales + head, value_scales + head, table,
            common, end, page_stride, slot_stride,
            scale, softcap, window, head_dim, page, chunk, has_window, has_cap,
            codes, num_heads // group,
            masked=True,
        )  # fmt: skip
        out = scaled(out, value_scales, codes)
    out = out / tl.where(live, total, 1.0)[:, None]
    where = (tokens * num_heads + heads) * head_dim
    tl.store(
        attended + where[:, None] + dims[None, :], out.to(attended.dtype.element_ty), mask=mask
    )


@triton.jit(
    do_not_specialize=["window", "table_stride", "num_spans"],
    do_not_specialize_on_alignment=["tables", "starts", "contexts"],
)
def attend_spans(
    partials,
    tops,
    totals,
    queries,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    tables,
    starts,
    contexts,
    scale,
    softcap,
    window,
    num_spans,
    table_stride,
    token_stride,
    head_stride,
    page_stride,
    slot_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    codes: tl.constexpr,
):
    """Attend single queries over each span separately, to `partials` [B, H, num_spans, head_dim]; grid (B, K, any).

    The number of programs that share the spans of a sequence affects only the speed.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - start != 1:
        return
    context = tl.load(contexts + sequence)
    row = tl.arange(0, rows)
    dims = tl.arange(0, triton.next_power_of_2(head_dim))
    mask = (row < group)[:, None] & (dims < head_dim)[None, :]
    heads = head * group + row
    where = start.to(tl.int64) * token_stride + heads * head_stride
    query = tl.load(queries + where[:, None] + dims[None, :], mask=mask, other=0.0)
    positions = tl.zeros([rows], tl.int32) + context - 1
    ends = positions + 1

    key_pages += head * head_dim
    value_pages += head * head_dim
    scale = scaled(scale, key_scales, codes)
    table = tables + sequence.to(tl.int64) * table_stride
    begin = 0
    if has_window:
        begin = tl.maximum(context - window, 0) // chunk * chunk
    last = span_of(context - 1)
    slots = (sequence.to(tl.int64) * num_heads + heads) * num_spans
    for span in range(span_of(begin) + tl.program_id(2), last + 1, tl.num_programs(2)):
        top = tl.full([rows], float("-inf"), tl.float32)
        total = tl.zeros([rows], tl.float32)
        out = tl.zeros([rows, dims.shape[0]], tl.float32)
        top, total, out = visit(
            top, total, out, query, positions, ends, key_pages, value_pages,
            key_scales + head, value_scales + head, table,
            tl.maximum(span_start(span), begin), tl.minimum(span_start(span + 1), context),
            page_stride, slot_stride,
            scale, softcap, window, head_dim, page, chunk, has_window, has_cap,
            codes, num_heads // group,
            masked=True,
        )  # fmt: skip
        tl.store(tops + slots + span, top, mask=row < group)
        tl.store(totals + slots + span, total, mask=row < group)
        where = (slots + span) * head_dim
        out = scaled(out, value_scales, codes)
        tl.store(partials + where[:, None] + dims[None, :], out, mask=mask)


@triton.jit(
    do_not_specialize=["window", "num_spans"],
    do_not_specialize_on_alignment=["starts", "contexts"],
)
def fold_spans(
    attended,
    partials,
    tops,
    totals,
    starts,
    contexts,
    window,
    sinks,
    num_spans,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    chunk: tl.constexpr,
    has_window: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Fold the partial results of single queries in the order of spans; grid (B, H)."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - start != 1:
        return
    context = tl.load(contexts + sequence)
    begin = 0
    if has_window:
        begin = tl.maximum(context - window, 0) // chunk * chunk
    last = span_of(context - 1)
    slot = (sequence.to(tl.int64) * num_heads + head) * num_spans
    one = tl.arange(0, 1)
    dims = tl.arange(0, triton.next_power_of_2(head_dim))
    known = (dims < head_dim)[None, :]
    top, total = nothing_seen(sinks, head + one, one == 0, 1, has_sinks)
    out = tl.zeros([1, dims.shape[0]], tl.float32)
    for base in range(span_of(begin), last + 1, _SPANS_PER_READ):
        for lane in tl.static_range(_SPANS_PER_READ):
            span = slot + base + lane + one
            live = base + lane + one <= last
            span_top = tl.load(tops + span, mask=live, other=float("-inf"))
            span_total = tl.load(totals + span, mask=live, other=0.0)
            where = (span * head_dim)[:, None] + dims[None, :]
            span_out = tl.load(partials + where, mask=live[:, None] & known, other=0.0)
            top, total, out = fold(top, total, out, span_top, span_total, span_out)
    out = out / total[:, None]
    where = (start.to(tl.int64) * num_heads + head) * head_dim + dims
    tl.store(attended + where[None, :], out.to(attended.dtype.element_ty), mask=known)
