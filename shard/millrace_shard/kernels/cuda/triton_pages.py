"""A Triton kernel that zeroes blocks of many caches at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096
"""Numbers of 32 bits that a program writes."""


@triton.jit
def _zero_pages(addresses, blocks, words, columns: tl.constexpr):
    """Zero block `blocks[i]`, of `words` int32, of the cache at `addresses[j]`; grid (i, j, parts of a block)."""
    page = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    where = tl.load(blocks + tl.program_id(0)) * words + column
    tl.store(page + where, tl.zeros([columns], tl.int32), mask=column < words)


def zero_pages(addresses: Tensor, blocks: Tensor, num_bytes: int) -> None:
    """Zero `blocks` [n] int64 of caches with blocks of `num_bytes`, at `addresses` [caches] int64, in one launch.

    A block has a multiple of 4 bytes.
    """
    if len(blocks) and num_bytes:
        words = num_bytes // 4
        grid = len(blocks), len(addresses), triton.cdiv(words, WORDS)
        _zero_pages[grid](addresses, blocks, words, columns=WORDS, num_warps=4)
