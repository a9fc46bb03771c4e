"""Elementwise functions on CPU whose every element goes through the same code, wherever in a tensor it lies.

torch computes them in loops over whole vectors, and what is left at the end of a thread's share one by one, by other
code that may round the last bit the other way. How many elements there are decides where shares end. So a number comes
out otherwise in another place or among more numbers, unless every share is whole vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

LANES = 64
"""Elements that the widest loop takes at a time: two vectors of 512 bits in bfloat16."""
GRAINS = (2048, 32768)
"""Elements below which one operator or another gives work to no further thread; a third kind gives it to all."""


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each element of `x`, of any shape; what it does to zeros is thrown away."""
    count = x.numel()
    length = padded_length(count, torch.get_num_threads())
    if length == count:
        return function(x.contiguous())
    padded = F.pad(x.reshape(-1), (0, length - count))
    return function(padded)[:count].view(x.shape)


@functools.lru_cache(maxsize=4096)
def padded_length(count: int, threads: int) -> int:
    """The least multiple of LANES * `threads`, not below `count`, of which every thread gets whole LANES."""
    step = LANES * threads
    length = -(-count // step) * step
    while any(_share(length, threads, grain) % LANES for grain in GRAINS):
        length += step
    return length


def _share(length: int, threads: int, grain: int) -> int:
    """Elements that at::parallel_for gives each thread but the last."""
    return -(-length // max(1, min(threads, -(-length // grain))))
