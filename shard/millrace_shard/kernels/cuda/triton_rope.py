"""Triton kernels that store keys and values in the paged cache, with or without norms and rotation.

A cache row is `block * block_size + offset`; caches are [num_blocks, block_size, K, head_dim], contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace_shard.kernels.base import LayerCache
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
def _normalise(part, scale, query_norm, key_norm, channel, width: tl.constexpr, is_query, is_key):
    """Channels of heads; queries and keys are normalised by `scale` [heads], with the rounding of `rms_norm`."""
    known = channel < width
    for_query = tl.load(query_norm + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    for_key = tl.load(key_norm + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    weight = tl.where(is_query[:, None], for_query, for_key)
    normed = (part.to(tl.float32) * scale[:, None]).to(part.dtype).to(tl.float32) * weight
    return tl.where((is_query | is_key)[:, None], normed.to(part.dtype), part)


@triton.jit(do_not_specialize_on_alignment=["positions", "cache_rows"])
def _rope_store(
    qkv,
    rope,
    positions,
    cache_rows,
    keys,
    values,
    query_norm,
    key_norm,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    heads: tl.constexpr,
    has_norms: tl.constexpr,
):
    """Rotate and store one token and `heads` of its heads per program; `half` is half of the rotated channels."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    is_query = head < num_heads
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)
    is_value = (head >= num_heads + num_kv_heads) & (head < num_heads + 2 * num_kv_heads)
    exists = is_query | is_key | is_value
    source = qkv + (token * (num_heads + 2 * num_kv_heads) + head) * head_dim
    cached = tl.load(cache_rows + token) * (num_kv_heads * head_dim)
    key = keys + cached + (head - num_heads) * head_dim
    value = values + cached + (head - num_heads - num_kv_heads) * head_dim

    channel = tl.arange(0, triton.next_power_of_2(half))
    inside = (channel < half)[None, :]
    angle = rope + tl.load(positions + token) * (2 * half) + channel
    cos = tl.load(angle, mask=channel < half, other=0.0)[None, :]
    sin = tl.load(angle + half, mask=channel < half, other=0.0)[None, :]
    lefts = source[:, None] + channel[None, :]
    left = tl.load(lefts, mask=exists[:, None] & inside, other=0.0)
    right = tl.load(lefts + half, mask=exists[:, None] & inside, other=0.0)
    if 2 * half < head_dim:
        last = 2 * half + tl.arange(0, triton.next_power_of_2(head_dim - 2 * half))
        within = (last < head_dim)[None, :]
        rests = source[:, None] + last[None, :]
        rest = tl.load(rests, mask=exists[:, None] & within, other=0.0)
    if has_norms:
        total = _squares(left) + _squares(right)
        if 2 * half < head_dim:
            total += _squares(rest)
        scale = tl.rsqrt(total / head_dim + eps)
        left = _normalise(left, scale, query_norm, key_norm, channel, half, is_query, is_key)
        right = _normalise(
            right, scale, query_norm + half, key_norm + half, channel, half, is_query, is_key
        )
    wide_left = left.to(tl.float32)
    wide_right = right.to(tl.float32)
    new_left = (wide_left * cos - wide_right * sin).to(left.dtype)
    new_right = (wide_right * cos + wide_left * sin).to(left.dtype)
    tl.store(lefts, new_left, mask=is_query[:, None] & inside)
    tl.store(lefts + half, new_right, mask=is_query[:, None] & inside)
    where = key[:, None] + channel[None, :]
    tl.store(where, new_left, mask=is_key[:, None] & inside)
    tl.store(where + half, new_right, mask=is_key[:, None] & inside)
    where = value[:, None] + channel[None, :]
    tl.store(where, left, mask=is_value[:, None] & inside)
    tl.store(where + half, right, mask=is_value[:, None] & inside)
    if 2 * half < head_dim:
        if has_norms:
            rest = _normalise(rest, scale, query_norm, key_norm, last, head_dim, is_query, is_key)
            tl.store(rests, rest, mask=is_query[:, None] & within)
        tl.store(key[:, None] + last[None, :], rest, mask=is_key[:, None] & within)
        tl.store(value[:, None] + last[None, :], rest, mask=is_value[:, None] & within)


@triton.jit(do_not_specialize_on_alignment=["cache_rows"])
def _store(
    new_keys,
    new_values,
    cache_rows,
    keys,
    values,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    heads: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    channel = tl.arange(0, triton.next_power_of_2(head_dim))
    mask = (head < num_kv_heads)[:, None] & (channel < head_dim)[None, :]
    cached = tl.load(cache_rows + token) * (num_kv_heads * head_dim) + head * head_dim
    where = token * key_token_stride + head * key_head_stride
    key = tl.load(new_keys + where[:, None] + channel[None, :], mask=mask)
    tl.store(keys + cached[:, None] + channel[None, :], key, mask=mask)
    where = token * value_token_stride + head * value_head_stride
    value = tl.load(new_values + where[:, None] + channel[None, :], mask=mask)
    tl.store(values + cached[:, None] + channel[None, :], value, mask=mask)


def rope_store(
    qkv: Tensor,
    rope: Tensor,
    batch: RaggedBatch,
    cache: LayerCache,
    num_heads: int,
    norms: HeadNorms | None,
) -> Tensor:
    """See Kernels. Queries are changed in place; rotated keys are written to the cache only.

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
            cache.keys,
            cache.values,
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
        cache.keys,
        cache.values,
        *keys.stride()[:2],
        *values.stride()[:2],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        heads=taken,
        num_warps=4,
    )


def _heads_taken(head_dim: int) -> int:
    return int(max(1, ELEMENTS // triton.next_power_of_2(head_dim)))
