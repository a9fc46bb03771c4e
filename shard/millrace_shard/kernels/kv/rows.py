"""Caches in rows of positions, with or without codes, in plain torch: made, written and read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.kv.codes import decode, encode_fp8, encode_int8, is_coded


def new_layer_cache(
    shape: Sequence[int],
    scale_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    scales: tuple[float, float],
) -> LayerCache:
    """Uninitialised keys and values of `shape`; int8 has scales of `scale_shape`, fp8 the given `scales`."""
    keys, values = (torch.empty(*shape, dtype=dtype, device=device) for _ in range(2))
    if not is_coded(dtype):
        return LayerCache(keys, values)
    if dtype == torch.int8:
        of_keys, of_values = (torch.empty(*scale_shape, device=device) for _ in range(2))
    else:
        of_keys, of_values = (torch.tensor([scale], device=device) for scale in scales)
    return LayerCache(keys, values, (of_keys, of_values))


def store_rows(keys: Tensor, values: Tensor, rows: Tensor, cache: LayerCache) -> None:
    """Store `keys` and `values` [T, num_kv_heads, head_dim] at cache rows `rows` [T]."""
    for index, (new, pages) in enumerate(((keys, cache.keys), (values, cache.values))):
        to = pages.view(-1, *pages.shape[2:])
        if cache.scales is None:
            to[rows] = new
        elif pages.dtype == torch.int8:
            codes, scales = encode_int8(new)
            to[rows] = codes
            cache.scales[index].view(-1, pages.shape[2])[rows] = scales
        else:
            to[rows] = encode_fp8(new, cache.scales[index], pages.dtype)


def read_blocks(cache: LayerCache, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of `blocks` [...], each [..., block_size, num_kv_heads, head_dim]; float32 if they are codes."""
    keys, values = cache.keys[blocks], cache.values[blocks]
    if cache.scales is None:
        return keys, values
    of_keys, of_values = (
        scales[blocks] if keys.dtype == torch.int8 else scales for scales in cache.scales
    )
    return decode(keys, of_keys), decode(values, of_values)
