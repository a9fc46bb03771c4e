"""Triton kernels that store keys and values in the paged cache, with or without norms and rotation.

A cache row is `block * block_size + offset`; caches are [num_blocks, block_size, K, head_dim], contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.cuda.triton_codes import (
    encoded,
    greatest,
    kind_of_codes,
    row_scales,
    stored,
)
from millrace_shard.kernels.cuda.triton_rows import scaled_by
from millrace_shard.kernels.layer_weights import HeadNorms
from millrace_shard.kernels.ragged import RaggedBatch

ELEMENTS = 1024
"""Elements of heads per program."""


@triton.jit
def _squares(part):
    """The sum of squares of each row, float32."""
    wide = part.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _normalise(
    part,
    scale,
    query_norm,
    key_norm,
    channel,
    known,
    is_query,
    is_key,
    plus_one: tl.constexpr,
    wide: tl.constexpr,
):
    """Channels of heads; queries and keys are normalised by `scale` [heads], with the rounding of `NormWeights`."""
    for_query = tl.load(query_norm + channel, mask=known, other=0.0)[None, :]
    for_key = tl.load(key_norm + channel, mask=known, other=0.0)[None, :]
    weight = tl.where(is_query[:, None], for_query, for_key)
    normed = part.to(tl.float32) * scale[:, None]
    normed = scaled_by(normed, weight, part.dtype, plus_one, wide)
    return tl.where((is_query | is_key)[:, None], normed.to(part.dtype), part)


@triton.jit
def _store_pairs(heads, channel, apart: tl.constexpr, left, right, mask):
    """Store the channels of pairs of `heads` [heads] of pointers; the two channels of a pair are `apart`."""
    where = heads[:, None] + channel[None, :]
    tl.store(where, left, mask=mask)
    tl.store(where + apart, right, mask=mask)


@triton.jit
def _store_heads(
    heads,
    scales,
    at,
    are_stored,
    channel,
    apart: tl.constexpr,
    left,
    right,
    known,
    last,
    rest,
    within,
    has_rest: tl.constexpr,
    codes: tl.constexpr,
):
    """Store whole heads in the cache: pairs, see `_store_pairs`, and the `rest` at channels `last`, if there is one.

    Pointers are `heads` [heads], of which those that `are_stored` are; the scales of codes are at `scales + at`.
    """
    if codes:
        top = tl.maximum(greatest(left), greatest(right))
        if has_rest:
            top = tl.maximum(top, greatest(rest))
        scale = row_scales(scales, at, top, are_stored, codes)
        left = encoded(left, scale, codes)
        right = encoded(right, scale, codes)
        if has_rest:
            rest = encoded(rest, scale, codes)
    _store_pairs(heads, channel, apart, left, right, are_stored[:, None] & known[None, :])
    if has_rest:
        mask = are_stored[:, None] & within[None, :]
        tl.store(heads[:, None] + last[None, :], rest, mask=mask)


@triton.jit
def rotated(left, right, cos, sin):
    """The rotated channels of pairs, in their dtype."""
    wide_left = left.to(tl.float32)
    wide_right = right.to(tl.float32)
    new_left = wide_left * cos - wide_right * sin
    new_right = wide_right * cos + wide_left * sin
    return new_left.to(left.dtype), new_right.to(left.dtype)


@triton.jit(do_not_specialize_on_alignment=["positions", "cache_rows"])
def _rope_store(
    qkv,
    rope,
    positions,
    cache_rows,
    keys,
    values,
    key_scales,
    value_scales,
    query_norm,
    key_norm,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    heads: tl.constexpr,
    has_norms: tl.constexpr,
    plus_one: tl.constexpr,
    wide: tl.constexpr,
    after_rope: tl.constexpr,
    interleaved: tl.constexpr,
    codes: tl.constexpr,
):
    """Rotate and store one token and `heads` of its heads per program; `half` is half of the rotated channels.

    The flags have the names of `NormWeights`, `HeadNorms` and `Rotation`.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    is_query = head < num_heads
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)
    is_value = (head >= num_heads + num_kv_heads) & (head < num_heads + 2 * num_kv_heads)
    exists = is_query | is_key | is_value
    source = qkv + (token * (num_heads + 2 * num_kv_heads) + head) * head_dim
    key_at = tl.load(cache_rows + token) * num_kv_heads + head - num_heads
    value_at = key_at - num_kv_heads
    key = keys + key_at * head_dim
    value = values + value_at * head_dim

    pair = tl.arange(0, triton.next_power_of_2(half))
    known = pair < half
    inside = known[None, :]
    angle = rope + tl.load(positions + token) * (2 * half) + pair
    cos = tl.load(angle, mask=known, other=0.0)[None, :]
    sin = tl.load(angle + half, mask=known, other=0.0)[None, :]
    # The channels of a pair.
    channel = pair * 2 if interleaved else pair
    apart: tl.constexpr = 1 if interleaved else half
    lefts = source[:, None] + channel[None, :]
    left = tl.load(lefts, mask=exists[:, None] & inside, other=0.0)
    right = tl.load(lefts + apart, mask=exists[:, None] & inside, other=0.0)
    has_rest: tl.constexpr = 2 * half < head_dim
    last = 2 * half + tl.arange(0, triton.next_power_of_2(head_dim - 2 * half) if has_rest else 1)
    within = last < head_dim
    rests = source[:, None] + last[None, :]
    rest = tl.load(rests, mask=exists[:, None] & within[None, :], other=0.0)
    _store_heads(
        value, value_scales, value_at, is_value,
        channel, apart, left, right, known, last, rest, within, has_rest, codes,
    )  # fmt: skip
    if after_rope:
        left, right = rotated(left, right, cos, sin)
    if has_norms:
        total = _squares(left) + _squares(right)
        if has_rest:
            total += _squares(rest)
        scale = tl.rsqrt(total / head_dim + eps)
        left = _normalise(
            left, scale, query_norm, key_norm, channel, known, is_query, is_key, plus_one, wide
        )
        right = _normalise(
            right,
            scale,
            query_norm + apart,
            key_norm + apart,
            channel,
            known,
            is_query,
            is_key,
            plus_one,
            wide,
        )
    if not after_rope:
        left, right = rotated(left, right, cos, sin)
    _store_pairs(source, channel, apart, left, right, is_query[:, None] & inside)
    if has_rest and has_norms:
        rest = _normalise(
            rest, scale, query_norm, key_norm, last, within, is_query, is_key, plus_one, wide
        )
        tl.store(rests, rest, mask=is_query[:, None] & within[None, :])
    _store_heads(
        key, key_scales, key_at, is_key,
        channel, apart, left, right, known, last, rest, within, has_rest, codes,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["cache_rows"])
def _store(
    new_keys,
    new_values,
    cache_rows,
    keys,
    values,
    key_scales,
    value_scales,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    heads: tl.constexpr,
    codes: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    is_head = head < num_kv_heads
    channel = tl.arange(0, triton.next_power_of_2(head_dim))
    mask = is_head[:, None] & (channel < head_dim)[None, :]
    at = tl.load(cache_rows + token) * num_kv_heads + head
    cached = (at * head_dim)[:, None] + channel[None, :]
    where = token * key_token_stride + head * key_head_stride
    key = tl.load(new_keys + where[:, None] + channel[None, :], mask=mask, other=0.0)
    where = token * value_token_stride + head * value_head_stride
    value = tl.load(new_values + where[:, None] + channel[None, :], mask=mask, other=0.0)
    if codes:
        key = encoded(key, row_scales(key_scales, at, greatest(key), is_head, codes), codes)
        value = encoded(value, row_scales(value_scales, at, greatest(value), is_head, codes), codes)
    tl.store(keys + cached, key, mask=mask)
    tl.store(values + cached, value, mask=mask)


def rope_store(
    qkv: Tensor,
    rope: Tensor,
    batch: RaggedBatch,
    cache: LayerCache,
    num_heads: int,
    norms: HeadNorms | None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """See Kernels. Queries are changed in place; rotated keys are written to the cache only.

    Norms may have any flag but centred ones, whole widths, and weights of each head.

    Raises ValueError if `qkv` [T, width] or `rope` is not contiguous.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = cache.keys.shape[2:]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    if not qkv.is_contiguous() or not rope.is_contiguous():
        raise ValueError("merged queries, keys and values, and the rope table must be contiguous")
    if num_tokens:
        taken = _heads_taken(head_dim)
        _rope_store[(num_tokens, triton.cdiv(heads.shape[1], taken))](
            qkv,
            rope,
            batch.positions,
            batch.cache_rows,
            *stored(cache),
            # Without norms the kernel reads none of them.
            qkv if norms is None else norms.query.weight,
            qkv if norms is None else norms.key.weight,
            0.0 if norms is None else norms.query.eps,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            half=rope.shape[1] // 2,
            heads=taken,
            has_norms=norms is not None,
            plus_one=norms is not None and norms.query.plus_one,
            wide=norms is not None and norms.query.wide,
            after_rope=norms is not None and norms.after_rope,
            interleaved=interleaved,
            codes=kind_of_codes(cache),
            num_warps=4,
        )
    return heads[:, :num_heads]


def store(keys: Tensor, values: Tensor, cache_rows: Tensor, cache: LayerCache) -> None:
    if keys.stride(2) != 1 or values.stride(2) != 1:
        keys, values = keys.contiguous(), values.contiguous()
    num_tokens, num_kv_heads, head_dim = keys.shape
    if num_tokens == 0:
        return
    taken = min(_heads_taken(head_dim), triton.next_power_of_2(num_kv_heads))
    _store[(num_tokens, triton.cdiv(num_kv_heads, taken))](
        keys,
        values,
        cache_rows,
        *stored(cache),
        *keys.stride()[:2],
        *values.stride()[:2],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        heads=taken,
        codes=kind_of_codes(cache),
        num_warps=4,
    )


def _heads_taken(head_dim: int) -> int:
    return int(max(1, ELEMENTS // triton.next_power_of_2(head_dim)))
