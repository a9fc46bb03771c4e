"""Triton kernels of attention over paged latents (MLA): tiles of queries, and single queries split over spans of keys.

T tokens, B sequences, H query heads. A row of a cache has a latent, which is the value of all heads, and behind it the
rotated channels of the key; its latent is read once for scores and sums of all rows of a tile. The rows of a tile are
consecutive pairs of a token and a head, so that any number of heads fills them. Chunks, spans and folding are those of
`triton_softmax`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace_shard.kernels.cuda.triton_attention import sequence_of
from millrace_shard.kernels.cuda.triton_linear import dot
from millrace_shard.kernels.cuda.triton_softmax import LOG2_E, fold, span_of, span_start

LEAST_CHANNELS = 16
"""Of a product of the tensor cores."""
_LEAST_CHANNELS = tl.constexpr(LEAST_CHANNELS)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _padded(channels: tl.constexpr):
    """The channels of a product that holds so many."""
    size: tl.constexpr = triton.next_power_of_2(channels)
    return tl.arange(0, size if size > _LEAST_CHANNELS else _LEAST_CHANNELS)


@triton.jit
def _read(pointers, known, channel, channels: tl.constexpr, masked: tl.constexpr):
    """Channels of rows at `pointers` [n, padded], 0 where not `known`, if `masked`, and past the last channel."""
    if masked:
        channels_read = tl.load(
            pointers, mask=known[:, None] & (channel < channels)[None, :], other=0.0
        )
    elif channel.shape[0] != channels:
        channels_read = tl.load(pointers, mask=(channel < channels)[None, :], other=0.0)
    else:
        channels_read = tl.load(pointers)
    return channels_read


@triton.jit
def _visit(
    top,
    total,
    out,
    of_latent,
    of_key,
    positions,
    pages,
    table,
    begin,
    end,
    page_stride,
    slot_stride,
    scale,
    latent_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    page: tl.constexpr,
    chunk: tl.constexpr,
    masked: tl.constexpr,
):
    """Update the softmax of a tile with the chunks from `begin` to `end`; unmasked, all rows must see all keys.

    Queries are `of_latent` and `of_key`, the channels that meet the latent and those that meet the rotated key.
    """
    offsets = tl.arange(0, chunk)
    channel = _padded(latent_dim)
    rotated = _padded(rope_dim)
    at = begin + offsets
    # Block numbers are loaded one chunk ahead, so that the loads of latents do not wait for their addresses.
    block = tl.load(table + at // page, mask=at < end, other=0)
    for start in range(begin, end, chunk):
        at = start + offsets
        known = at < end
        row = block.to(tl.int64) * page_stride + (at % page) * slot_stride
        block = tl.load(table + (at + chunk) // page, mask=at + chunk < end, other=0)
        where = pages + row[:, None]
        latents = _read(where + channel[None, :], known, channel, latent_dim, masked)
        keys = _read(where + (latent_dim + rotated)[None, :], known, rotated, rope_dim, masked)
        raw = tl.zeros([of_latent.shape[0], chunk], tl.float32)
        raw = dot(of_key, tl.trans(keys), raw)
        raw = dot(of_latent, tl.trans(latents), raw)
        if masked:
            raw = tl.where(at[None, :] <= positions[:, None], raw, float("-inf"))
        factor = scale * _LOG2_E
        new_top = tl.maximum(top, tl.max(raw, 1) * factor)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tl.fma(raw, factor, tl.broadcast_to(-shift[:, None], raw.shape)))
        carried = tl.exp2(top - shift)
        total = tl.fma(total, carried, tl.sum(weights, 1))
        out = dot(weights.to(latents.dtype), latents, out * carried[:, None])
        top = new_top
    return top, total, out


@triton.jit
def _nothing_seen(rows: tl.constexpr, latent_dim: tl.constexpr):
    """Top, total and sums of rows that have seen no key."""
    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    return top, total, tl.zeros([rows, _padded(latent_dim).shape[0]], tl.float32)


@triton.jit
def _queries_of(queries, where, live, latent_dim: tl.constexpr, rope_dim: tl.constexpr):
    """The two parts of queries at offsets `where` [rows], see `_visit`."""
    channel = _padded(latent_dim)
    rotated = _padded(rope_dim)
    at = queries + where[:, None]
    of_latent = _read(at + channel[None, :], live, channel, latent_dim, masked=True)
    of_key = _read(at + (latent_dim + rotated)[None, :], live, rotated, rope_dim, masked=True)
    return of_latent, of_key


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["tables", "starts", "contexts"],
)
def attend_latent_tiles(
    attended,
    queries,
    key_pages,
    tables,
    starts,
    contexts,
    scale,
    num_sequences,
    table_stride,
    token_stride,
    head_stride,
    page_stride,
    slot_stride,
    num_heads: tl.constexpr,
    latent_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    page: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
    in_spans: tl.constexpr,
):
    """Attend sequences of several queries, one tile per program, to `attended` [T, H, latent_dim]; grid (tile slots).

    Late tiles, which see most keys, run first. With `in_spans`, results are folded by spans, as for single queries.
    """
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = sequence_of(slot, starts, num_sequences, rows, num_heads)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    first = (slot - start * num_heads // rows - sequence) * rows
    if (first >= count * num_heads) | (count == 1):
        return
    before = tl.load(contexts + sequence) - count
    pair = first + tl.arange(0, rows)
    token = pair // num_heads
    live = token < count
    positions = before + token
    tokens = (start + token).to(tl.int64)
    where = tokens * token_stride + pair % num_heads * head_stride
    of_latent, of_key = _queries_of(queries, where, live, latent_dim, rope_dim)

    table = tables + sequence.to(tl.int64) * table_stride
    end = before + tl.minimum(count, (first + rows - 1) // num_heads + 1)
    # Every row of the tile sees every key before this position.
    common = (before + first // num_heads + 1) // chunk * chunk
    top, total, out = _nothing_seen(rows, latent_dim)
    if in_spans:
        for span in range(span_of(end - 1) + 1):
            span_begin = span_start(span)
            span_end = tl.minimum(span_start(span + 1), end)
            span_top, span_total, span_out = _nothing_seen(rows, latent_dim)
            span_top, span_total, span_out = _visit(
                span_top, span_total, span_out, of_latent, of_key, positions, key_pages, table,
                span_begin, tl.minimum(span_end, common), page_stride, slot_stride, scale,
                latent_dim, rope_dim, page, chunk, masked=False,
            )  # fmt: skip
            span_top, span_total, span_out = _visit(
                span_top, span_total, span_out, of_latent, of_key, positions, key_pages, table,
                tl.maximum(span_begin, common), span_end, page_stride, slot_stride, scale,
                latent_dim, rope_dim, page, chunk, masked=True,
            )  # fmt: skip
            top, total, out = fold(top, total, out, span_top, span_total, span_out)
    else:
        top, total, out = _visit(
            top, total, out, of_latent, of_key, positions, key_pages, table,
            0, common, page_stride, slot_stride, scale,
            latent_dim, rope_dim, page, chunk, masked=False,
        )  # fmt: skip
        top, total, out = _visit(
            top, total, out, of_latent, of_key, positions, key_pages, table,
            common, end, page_stride, slot_stride, scale,
            latent_dim, rope_dim, page, chunk, masked=True,
        )  # fmt: skip
    out = out / tl.where(live, total, 1.0)[:, None]
    channel = _padded(latent_dim)
    where = (tokens * num_heads + pair % num_heads) * latent_dim
    mask = live[:, None] & (channel < latent_dim)[None, :]
    tl.store(
        attended + where[:, None] + channel[None, :], out.to(attended.dtype.element_ty), mask=mask
    )


@triton.jit(
    do_not_specialize=["num_spans", "table_stride"],
    do_not_specialize_on_alignment=["tables", "starts", "contexts"],
)
def attend_latent_spans(
    partials,
    tops,
    totals,
    queries,
    key_pages,
    tables,
    starts,
    contexts,
    scale,
    num_spans,
    table_stride,
    token_stride,
    head_stride,
    page_stride,
    slot_stride,
    num_heads: tl.constexpr,
    latent_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    page: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
):
    """Attend single queries over each span separately, to `partials` [B, H, num_spans, latent_dim].

    Grid (B, tiles of heads, any): the number of programs that share the spans of a sequence affects only the speed.
    `triton_attention.fold_spans` folds the results.
    """
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - start != 1:
        return
    context = tl.load(contexts + sequence)
    head = tl.program_id(1) * rows + tl.arange(0, rows)
    live = head < num_heads
    where = start.to(tl.int64) * token_stride + head * head_stride
    of_latent, of_key = _queries_of(queries, where, live, latent_dim, rope_dim)
    positions = tl.zeros([rows], tl.int32) + context - 1
    table = tables + sequence.to(tl.int64) * table_stride
    slots = (sequence.to(tl.int64) * num_heads + head) * num_spans
    channel = _padded(latent_dim)
    mask = live[:, None] & (channel < latent_dim)[None, :]
    for span in range(tl.program_id(2), span_of(context - 1) + 1, tl.num_programs(2)):
        top, total, out = _nothing_seen(rows, latent_dim)
        top, total, out = _visit(
            top, total, out, of_latent, of_key, positions, key_pages, table,
            span_start(span), tl.minimum(span_start(span + 1), context),
            page_stride, slot_stride, scale,
            latent_dim, rope_dim, page, chunk, masked=True,
        )  # fmt: skip
        tl.store(tops + slots + span, top, mask=live)
        tl.store(totals + slots + span, total, mask=live)
        where = (slots + span) * latent_dim
        tl.store(partials + where[:, None] + channel[None, :], out, mask=mask)
