"""Triton kernels around attention over latents: a linear for each head, and norm, rotation and storage of a token.

The bits of a row depend on no other row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.cuda.linear_tilings import row_tiling
from millrace_shard.kernels.cuda.triton_linear import dot, tile_of
from millrace_shard.kernels.cuda.triton_rope import rotated
from millrace_shard.kernels.cuda.triton_rows import scaled_by
from millrace_shard.kernels.layer_weights import NormWeights, Rotation
from millrace_shard.kernels.ragged import RaggedBatch


@triton.jit(do_not_specialize=["num_rows"])
def multiply_heads(
    out,
    x,
    weight,
    num_rows,
    row_stride,
    head_stride,
    out_row_stride,
    out_head_stride,
    num_outputs,
    num_inputs,
    whole_blocks: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """Multiply `x` [num_rows, heads, num_inputs] by `weight` [heads, num_outputs, num_inputs]; grid (tiles, heads).

    Products are added in order. With `whole_blocks`, `num_inputs` is a multiple of `inputs`.
    """
    head = tl.program_id(1).to(tl.int64)
    row, output = tile_of(num_rows, num_outputs, rows, outputs)
    has_row = (row < num_rows)[:, None]
    has_output = (output < num_outputs)[:, None]
    at = tl.arange(0, inputs)
    x_rows = x + head * head_stride + (row.to(tl.int64) * row_stride)[:, None]
    weight_rows = weight + (head * num_outputs + output)[:, None] * num_inputs
    total = tl.zeros([outputs, rows], tl.float32)
    for start in range(0, num_inputs, inputs):
        column = (start + at)[None, :]
        if whole_blocks:
            left = tl.load(weight_rows + column, mask=has_output, other=0.0)
            right = tl.load(x_rows + column, mask=has_row, other=0.0)
        else:
            known = column < num_inputs
            left = tl.load(weight_rows + column, mask=has_output & known, other=0.0)
            right = tl.load(x_rows + column, mask=has_row & known, other=0.0)
        total = dot(left, tl.trans(right), total)
    where = head * out_head_stride + row.to(tl.int64) * out_row_stride
    mask = has_output & (row < num_rows)[None, :]
    tl.store(out + where[None, :] + output[:, None], total.to(out.dtype.element_ty), mask=mask)


class LinearOfHeads:
    """Linears of all heads in one launch."""

    def __init__(self, weight: Tensor) -> None:
        """Keep `weight` [heads, out, in]."""
        self._weight = weight.contiguous()

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the results of `x` [T, heads, in] to `out` [T, heads, out], whose last axes are contiguous."""
        num_heads, num_outputs, num_inputs = self._weight.shape
        if not len(x):
            return
        tiling = row_tiling(x.dtype, len(x), has_one_sum=True)
        num_tiles = triton.cdiv(len(x), tiling.rows) * triton.cdiv(num_outputs, tiling.outputs)
        multiply_heads[(num_tiles, num_heads)](
            out,
            x,
            self._weight,
            len(x),
            *x.stride()[:2],
            *out.stride()[:2],
            num_outputs,
            num_inputs,
            whole_blocks=num_inputs % tiling.inputs == 0,
            rows=tiling.rows,
            outputs=tiling.outputs,
            inputs=tiling.inputs,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )


@triton.jit
def _move_pairs(to, source, channel, mask, apart: tl.constexpr, cos, sin, rotates: tl.constexpr):
    """Copy or rotate the pairs of channels at `source`; the two channels of a pair are `apart`."""
    left = tl.load(source + channel, mask=mask, other=0.0)
    right = tl.load(source + channel + apart, mask=mask, other=0.0)
    if rotates:
        left, right = rotated(left, right, cos, sin)
    tl.store(to + channel, left, mask=mask)
    tl.store(to + channel + apart, right, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions", "cache_rows"])
def store_latents(
    out,
    queries,
    x,
    weight,
    eps,
    rope,
    positions,
    cache_rows,
    keys,
    query_stride,
    head_stride,
    row_stride,
    out_stride,
    num_heads: tl.constexpr,
    latent_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    plus_one: tl.constexpr,
    wide: tl.constexpr,
    rotates: tl.constexpr,
    interleaved: tl.constexpr,
):
    """See `Kernels.prepare_latents`: `out` are its heads, and `x` is its shared tensor; grid (T)."""
    width: tl.constexpr = latent_dim + rope_dim
    half: tl.constexpr = rope_dim // 2
    token = tl.program_id(0).to(tl.int64)
    x += token * row_stride
    key = keys + tl.load(cache_rows + token) * width
    channel = tl.arange(0, triton.next_power_of_2(latent_dim))
    inside = channel < latent_dim
    latent = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + channel, mask=inside, other=0.0)
    normed = latent * tl.rsqrt(tl.sum(latent * latent, 0) / latent_dim + eps)
    normed = scaled_by(normed, scales, x.dtype.element_ty, plus_one, wide)
    tl.store(key + channel, normed.to(keys.dtype.element_ty), mask=inside)

    pair = tl.arange(0, triton.next_power_of_2(half))
    known = pair < half
    cos, sin = pair.to(tl.float32), pair.to(tl.float32)
    if rotates:
        angle = rope + tl.load(positions + token) * rope_dim + pair
        cos = tl.load(angle, mask=known, other=0.0)
        sin = tl.load(angle + half, mask=known, other=0.0)
    pair = pair * 2 if interleaved else pair
    apart: tl.constexpr = 1 if interleaved else half
    _move_pairs(key + latent_dim, x + latent_dim, pair, known, apart, cos, sin, rotates)
    head = tl.arange(0, triton.next_power_of_2(num_heads))[:, None]
    source = queries + token * query_stride + head * head_stride
    to = out + token * out_stride + head * width + latent_dim
    mask = (head < num_heads) & known[None, :]
    _move_pairs(to, source, pair[None, :], mask, apart, cos[None, :], sin[None, :], rotates)


def has_kernel(norm: NormWeights, rotation: Rotation | None, rope_dim: int) -> bool:
    """Whether `prepare_latents` has this norm, and this rotation of `rope_dim` channels."""
    turns_all = rotation is None or rotation.table.shape[1] == rope_dim
    return turns_all and rope_dim % 2 == 0 and not norm.centred and norm.bias is None


def prepare_latents(
    heads: Tensor,
    queries: Tensor,
    shared: Tensor,
    norm: NormWeights,
    rotation: Rotation | None,
    batch: RaggedBatch,
    cache: LayerCache,
) -> None:
    """See Kernels; there must be a kernel, see `has_kernel`. The last axes of all tensors are contiguous."""
    num_tokens, num_heads, rope_dim = queries.shape
    if not num_tokens:
        return
    store_latents[(num_tokens,)](
        heads,
        queries,
        shared,
        norm.weight,
        norm.eps,
        shared if rotation is None else rotation.table,
        batch.positions,
        batch.cache_rows,
        cache.keys,
        *queries.stride()[:2],
        shared.stride(0),
        heads.stride(0),
        num_heads=num_heads,
        latent_dim=cache.latent_dim,
        rope_dim=rope_dim,
        plus_one=norm.plus_one,
        wide=norm.wide,
        rotates=rotation is not None,
        interleaved=rotation is not None and rotation.interleaved,
        num_warps=4,
    )
