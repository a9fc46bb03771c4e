"""KV caches in rows of positions, quantised to 8 bits or not, in plain torch: the oracle of the compiled kernels.

int8 is symmetric with one scale per position and head, which depends only on that key or value, so that prefixes,
chunks and replays have the same codes. Scales are float32: scales of small values would be subnormal in float16. fp8
has one scale for all positions and heads, from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace_shard.kernels.base import LayerCache

CACHE_DTYPES = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""Dtypes of codes by the names of `--kv-cache-dtype`."""
LARGEST = 127.0


def is_coded(dtype: torch.dtype) -> bool:
    """Whether a cache of `dtype` holds codes, not the values of the model."""
    return dtype in CACHE_DTYPES.values()


def cache_dtype_name(dtype: torch.dtype) -> str:
    """The name of a cache's dtype: the value of `--kv-cache-dtype` for codes, else torch's name."""
    names = {dtype: name for name, dtype in CACHE_DTYPES.items()}
    return names.get(dtype) or str(dtype).removeprefix("torch.")


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the key or value of one position and head."""
    return head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == torch.int8 else 0)


def encode_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x` [..., head_dim]; the scale [...] of values that are not finite is NaN, their codes 0."""
    wide = x.float()
    scales = wide.abs().amax(-1) * (1 / LARGEST)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = (wide / scales.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST)
    return codes.nan_to_num(0.0).to(torch.int8), scales


def encode_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of `x` / `scale`. Values past the largest one saturate; those that are not finite become NaN."""
    wide = x.float() / scale
    largest = torch.finfo(dtype).max
    within = torch.where(wide.isfinite(), wide.clamp(-largest, largest), torch.nan)
    return within.to(dtype)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The values of `codes` [..., head_dim] float32; `scales` are [...], or one for all."""
    return codes.float() * (scales if scales.numel() == 1 else scales.unsqueeze(-1))


def new_layer_cache(
    shape: Sequence[int],
    scale_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    scales: tuple[float, float],
    latent_dim: int | None = None,
) -> LayerCache:
    """Uninitialised keys and values of `shape`; int8 has scales of `scale_shape`, fp8 the given `scales`.

    With `latent_dim`, values are in the keys. Raises ValueError for codes of latents.
    """
    if latent_dim is not None:
        if is_coded(dtype):
            raise ValueError(f"latents are kept in the dtype of the model, not as codes of {dtype}")
        keys = torch.empty(*shape, dtype=dtype, device=device)
        return LayerCache(keys, keys, latent_dim=latent_dim)
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
    stored = ((keys, cache.keys), (values, cache.values))[: 2 if cache.latent_dim is None else 1]
    for index, (new, pages) in enumerate(stored):
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
    """Keys and values of `blocks` [...], each [..., block_size, num_kv_heads, head_dim]; float32 if they are codes.

    The last axis of values of latents is `latent_dim`.
    """
    keys = cache.keys[blocks]
    if cache.latent_dim is not None:
        return keys, keys[..., : cache.latent_dim]
    values = cache.values[blocks]
    if cache.scales is None:
        return keys, values
    of_keys, of_values = (
        scales[blocks] if keys.dtype == torch.int8 else scales for scales in cache.scales
    )
    return decode(keys, of_keys), decode(values, of_values)
