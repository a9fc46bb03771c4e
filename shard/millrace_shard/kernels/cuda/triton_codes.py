"""Parts of Triton kernels for keys and values in codes of 8 bits, which `kv_cache` makes in plain torch, too.

Every code is a number of float16, and of bfloat16, so that products are over the codes themselves. fp8's scale of all
keys multiplies the scores' scale, and its scale of all values their sum; int8's scales multiply each key's scores and
each value's weights. Numbers become codes by integer arithmetic: instructions differ between generations of GPUs, or
round twice. Rows for products in e4m3 become codes by the same parts.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.kv_cache import LARGEST, is_coded

NO_CODES = 0
INT8 = 1
E5M2 = 2
E4M3 = 3
E4M3_BY_DEVICE = 4
"""As E4M3, on GPUs that convert these codes to numbers."""
E2M1 = 5
CONVERTS_E4M3 = (8, 9)
"""The first compute capability whose instructions convert float8_e4m3fn."""

_INT8 = tl.constexpr(INT8)
_E5M2 = tl.constexpr(E5M2)
_E4M3 = tl.constexpr(E4M3)
_LARGEST_E4M3 = tl.constexpr(448.0)
_E4M3_BY_DEVICE = tl.constexpr(E4M3_BY_DEVICE)
_PER_LARGEST = tl.constexpr(1 / LARGEST)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""The last bits of a float32 of this size are the last bits of the integer that was added."""
_INFINITY = tl.constexpr(0x7F800000)
"""The bits of float32."""
_NAN = tl.constexpr(0x7F)
"""A code of both formats of fp8."""
_E2M1 = tl.constexpr(E2M1)
# numpy has no bfloat16, so that the interpreter cannot add it.
RAISED_BF16 = tl.constexpr(tl.float16 if knobs.runtime.interpret else tl.bfloat16)


@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether kernels on `device` convert bytes; Triton's interpreter makes a number of NaN."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CONVERTS_E4M3


def kind_of_codes(cache: LayerCache) -> int:
    """The kind of codes of a cache, of the constants above."""
    kinds = {torch.int8: INT8, torch.float8_e5m2: E5M2, torch.float8_e4m3fn: E4M3}
    kind = kinds.get(cache.keys.dtype, NO_CODES)
    return E4M3_BY_DEVICE if kind == E4M3 and converts_e4m3(cache.keys.device) else kind


def stored(cache: LayerCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and the scales of both for a kernel: codes as uint8. Without codes it does not read scales."""
    if cache.scales is None or not is_coded(cache.keys.dtype):
        return cache.keys, cache.values, cache.keys, cache.values
    return cache.keys.view(torch.uint8), cache.values.view(torch.uint8), *cache.scales


@triton.jit
def numbers(codes, kind: tl.constexpr, element: tl.constexpr):
    """The numbers of `codes` uint8, in `element`, which has them exactly; what is read without codes, as it is."""
    if kind == 0:
        result = codes
    elif kind == _E4M3_BY_DEVICE:
        result = codes.to(tl.float8e4nv, bitcast=True).to(element)
    elif kind == _E4M3:
        result = _widened(codes, 8, 3, element).to(element)
    elif kind == _E2M1:
        result = _widened(codes, 4, 1, element).to(element)
    else:
        wide = codes.to(tl.uint16)
        if kind == _INT8:
            # The last bits of the fraction of 1024 are the code plus 128.
            half = ((wide ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        else:
            half = (wide << 8).to(tl.float16, bitcast=True)
        result = half.to(element)
    return result


@triton.jit
def _widened(codes, bits: tl.constexpr, fraction: tl.constexpr, element: tl.constexpr):
    """Floats of `bits` bits, of which `fraction` are the fraction's, as bfloat16 for that `element`, else float16."""
    wide: tl.constexpr = RAISED_BF16 if element == tl.bfloat16 else tl.float16
    shift: tl.constexpr = (7 if wide == tl.bfloat16 else 10) - fraction
    bias: tl.constexpr = (127 if wide == tl.bfloat16 else 15) - ((1 << (bits - 2 - fraction)) - 1)
    factor: tl.constexpr = 2.0**bias
    whole = codes.to(tl.uint16)
    size = whole & ((1 << (bits - 1)) - 1)
    sign = (whole >> (bits - 1)) << 15
    # The wider format only has another bias of the exponent, also below the least normal number.
    values = (sign | (size << shift)).to(wide, bitcast=True) * factor
    if bits == 8:
        values = tl.where(size == _NAN, float("nan"), values)
    return values


@triton.jit
def scaled(x, scales, kind: tl.constexpr):
    """`x` times the scale of all keys or values in fp8, or as it is."""
    if kind > _INT8:
        x = x * tl.load(scales)
    return x


@triton.jit
def greatest(x):
    """The bits of the greatest size in each row of `x` [n, m], as int32; NaN is the greatest."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def row_scales(scales, at, top, mask, kind: tl.constexpr):
    """The scales of rows [n]: int8's follow from `top`, see `greatest`, and are stored in `scales` where `mask`."""
    if kind == _INT8:
        scale = top.to(tl.float32, bitcast=True) * _PER_LARGEST
        scale = tl.where(top < _INFINITY, scale, float("nan"))
        tl.store(scales + at, scale, mask=mask)
    else:
        scale = tl.load(scales) + tl.zeros(top.shape, tl.float32)
    return scale


@triton.jit
def encoded(x, scale, kind: tl.constexpr):
    """The codes of `x` [n, m] over `scale` [n], rounded to even; fp8's saturate."""
    has_scale = scale[:, None] > 0.0
    divisor = tl.broadcast_to(tl.where(has_scale, scale[:, None], 1.0), x.shape)
    ratio = tl.div_rn(x.to(tl.float32), divisor)
    if kind == _INT8:
        rounded = tl.minimum(tl.maximum(ratio, -127.0), 127.0) + _ROUNDER
        code = rounded.to(tl.uint32, bitcast=True) & 0xFF
        # The scale of zeros is 0, and the scale of values that are not finite is NaN.
        code = tl.where(has_scale, code, 0)
    else:
        fraction: tl.constexpr = 2 if kind == _E5M2 else 3
        bias: tl.constexpr = 15 if kind == _E5M2 else 7
        largest: tl.constexpr = 57344.0 if kind == _E5M2 else 448.0
        shift: tl.constexpr = 23 - fraction
        bits = ratio.to(tl.uint32, bitcast=True)
        is_number = (bits & 0x7FFFFFFF) < _INFINITY
        size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), largest)
        wide = size.to(tl.uint32, bitcast=True)
        normal = (wide + ((1 << (shift - 1)) - 1) + ((wide >> shift) & 1)) >> shift
        normal = normal - ((127 - bias) << fraction)
        # Below the least normal number codes are multiples of the last bit of this float32.
        least: tl.constexpr = 2.0 ** (24 - bias - fraction)
        small = (size + least).to(tl.uint32, bitcast=True) & 0x7FFFFF
        code = tl.where(size < 2.0 ** (1 - bias), small, normal) | ((bits >> 24) & 0x80)
        code = tl.where(is_number, code, _NAN)
    return code.to(tl.uint8)


@triton.jit(do_not_specialize=["num_rows"])
def code_rows(
    codes, row_scales, x, num_rows, row_stride, row_step, group_step, width, columns: tl.constexpr
):
    """`x` [num_rows, inputs] in codes of e4m3, with a scale for `width` inputs of a row, whose largest is 448.

    Grid (rows, groups); rows past the last one are 0. Scales are float32, with strides `row_step` and `group_step`.
    """
    row = tl.program_id(0)
    group = tl.program_id(1)
    source = x + row.to(tl.int64) * row_stride + group * width
    top = tl.zeros([1], tl.int32)
    for begin in range(0, width, columns):
        at = begin + tl.arange(0, columns)
        known = (at < width) & (row < num_rows)
        top = tl.maximum(top, greatest(tl.load(source + at, mask=known, other=0.0)[None, :]))
    scale = tl.div_rn(top.to(tl.float32, bitcast=True), tl.full([1], _LARGEST_E4M3, tl.float32))
    tl.store(row_scales + row * row_step + group * group_step + tl.arange(0, 1), scale)
    out = codes + (row.to(tl.int64) * tl.num_programs(1) + group) * width
    for begin in range(0, width, columns):
        at = begin + tl.arange(0, columns)
        inputs = tl.load(source + at, mask=(at < width) & (row < num_rows), other=0.0)
        code = encoded(inputs[None, :], scale, _E4M3)
        tl.store(out[None, None] + at[None, :], code, mask=(at < width)[None, :])
