"""Thresholds of rows by histograms of their keys: no sort, and integer sums that are exact in any order.

The bits of a key are read as an unsigned integer of the same order, from the top in three levels. Each level weighs the
keys that share the bits chosen so far, by their next bits, and chooses the bucket in which the limit is reached.
Kernels end between the two, so no program reads sums that another one is still adding to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_shard.kernels.scores import SCALE_BITS

LEVELS = ((21, 11), (10, 11), (0, 10))
"""The lowest bit and the number of bits of each level."""
MOST_BUCKETS = 1 << 11
KEYS_PER_PROGRAM = 4096
MOST_COPIES = 8
"""Of the histogram of the first level, for few rows."""
COPIED_ROWS = 256
"""Rows, times copies, that occupy the caches of any GPU by themselves."""

_SCALE = tl.constexpr(float(1 << SCALE_BITS))
_SIGN = tl.constexpr(1 << 31)
_WORD = tl.constexpr((1 << 32) - 1)
_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_INFINITY = tl.constexpr(0x7F800000)
_LEAST = tl.constexpr(0x007FFFFF)
"""Minus infinity in the order of unsigned integers."""


@triton.jit
def ordered(keys):
    """The bits of `keys` float32 as uint32 in their order: -0.0 is next to 0.0, and NaN is the greatest."""
    bits = keys.to(tl.uint32, bitcast=True)
    result = tl.where(bits >= _SIGN, bits ^ _WORD, bits | _SIGN)
    return tl.where((bits & _MAGNITUDE) > _INFINITY, _WORD, result)


@triton.jit(do_not_specialize=["copies"])
def weigh(
    sums,
    keys,
    probabilities,
    prefixes,
    size,
    copies,
    low: tl.constexpr,
    high: tl.constexpr,
    num_buckets: tl.constexpr,
    has_probabilities: tl.constexpr,
    chunk: tl.constexpr,
):
    """Add up the keys of each row by their bits from `low` to `high`, if the bits above are the row's prefix.

    `sums` is [rows, copies, num_buckets]. Neighbouring keys go to different copies: additions to one number wait for
    each other, and most keys of a row lie in a few buckets.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * chunk + tl.arange(0, chunk)
    chosen = column < size
    bits = ordered(tl.load(keys + row * size + column, mask=chosen, other=0.0))
    if high < 32:
        chosen = chosen & ((bits >> high).to(tl.int64) == tl.load(prefixes + row))
    weights = tl.full([chunk], 1, tl.int64)
    if has_probabilities:
        found = tl.load(probabilities + row * size + column, mask=chosen, other=0.0)
        # NaN weighs nothing: its integer differs between devices.
        weights = tl.where(found > 0, found * _SCALE, 0.0).to(tl.int64)
    bucket = ((bits >> low) & (num_buckets - 1)).to(tl.int32)
    chosen = chosen & (weights > 0)
    where = (row * copies + column % copies) * num_buckets + bucket
    tl.atomic_add(sums + where, weights, mask=chosen, sem="relaxed")


@triton.jit(do_not_specialize=["copies"])
def choose(
    thresholds,
    prefixes,
    budgets,
    sums,
    limits,
    copies,
    num_buckets: tl.constexpr,
    is_first: tl.constexpr,
    is_last: tl.constexpr,
    is_share: tl.constexpr,
):
    """Choose the bucket of each row in which its budget is reached; a prefix below 0 means that it never is."""
    row = tl.program_id(0).to(tl.int64)
    # The bucket of the greatest keys comes first.
    place = num_buckets - 1 - tl.arange(0, num_buckets)
    weights = tl.zeros([num_buckets], tl.int64)
    for copy in range(copies):
        weights += tl.load(sums + (row * copies + copy) * num_buckets + place)
    ends = tl.cumsum(weights, 0)
    if not is_first:
        prefix = tl.load(prefixes + row)
        budget = tl.load(budgets + row)
    else:
        prefix = row * 0
        if is_share:
            share = tl.load(limits + row).to(tl.float64)
            total = tl.max(ends, 0).to(tl.float64)
            budget = tl.maximum(tl.ceil(share * total).to(tl.int64), 1)
        else:
            budget = tl.load(limits + row)
    above = ends < budget
    prefix = prefix * num_buckets + num_buckets - 1 - tl.sum(above.to(tl.int64), 0)
    if is_last:
        order = tl.maximum(prefix, _LEAST)
        bits = tl.where(order >= _SIGN, order - _SIGN, _WORD - order)
        tl.store(thresholds + row, bits.to(tl.uint32).to(tl.float32, bitcast=True))
    else:
        tl.store(prefixes + row, prefix)
        tl.store(budgets + row, budget - tl.max(tl.where(above, ends, 0), 0))


def find_threshold(keys: Tensor, probabilities: Tensor | None, limit: Tensor) -> Tensor:
    """See FindThreshold. Takes 48 KiB of scratch memory a row, or up to 4 MiB for all."""
    num_rows, size = keys.shape
    keys = keys.contiguous()
    weighed = keys if probabilities is None else probabilities.contiguous()
    limit = limit.contiguous()
    # Only in the first level do most keys meet in a few buckets.
    copies = [max(1, min(MOST_COPIES, COPIED_ROWS // max(1, num_rows))), 1, 1]
    # A histogram for each level, so that one operation clears all.
    sums = keys.new_zeros(num_rows * sum(copies), MOST_BUCKETS, dtype=torch.int64)
    of_levels = sums.split([num_rows * count for count in copies])
    prefixes, budgets = keys.new_empty(2, num_rows, dtype=torch.int64)
    thresholds = keys.new_empty(num_rows, 1)
    if num_rows == 0:
        return thresholds
    for level, (low, num_bits) in enumerate(LEVELS):
        weigh[(num_rows, triton.cdiv(size, KEYS_PER_PROGRAM))](
            of_levels[level],
            keys,
            weighed,
            prefixes,
            size,
            copies[level],
            low=low,
            high=low + num_bits,
            num_buckets=1 << num_bits,
            has_probabilities=probabilities is not None,
            chunk=KEYS_PER_PROGRAM,
            num_warps=8,
        )
        choose[(num_rows,)](
            thresholds,
            prefixes,
            budgets,
            of_levels[level],
            limit,
            copies[level],
            num_buckets=1 << num_bits,
            is_first=level == 0,
            is_last=level == len(LEVELS) - 1,
            is_share=probabilities is not None,
            num_warps=4,
        )
    return thresholds
