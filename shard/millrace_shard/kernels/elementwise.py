"""Elementwise functions on CPU that run the same code for every element, whatever its place in the tensor.

torch runs vector loops, and computes the rest of a thread's share element by element, with other code that may round
differently. The number of elements determines where the shares end. The bits of a result would therefore depend on its
place and on the size of the tensor, unless every share consists of whole vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

LANES = 64
"""Elements per iteration of the widest loop: two vectors of 512 bits in bfloat16."""
GRAINS = (2048, 32768)
"""Grain sizes of torch's operators: the fewest elements for another thread. Some operators always use all threads."""


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `function` to each element of `x`, of any shape, which may be padded with zeros meanwhile."""
    count = x.numel()
    length = padded_length(count, torch.get_num_threads())
    if length == count:
        return function(x.contiguous())
    padded = F.pad(x.reshape(-1), (0, length - count))
    return function(padded)[:count].view(x.shape)


@functools.lru_cache(maxsize=4096)
def padded_length(count: int, threads: int) -> int:
    """The least multiple of LANES * `threads`, at least `count`, that all operators split into multiples of LANES."""
    step = LANES * threads
    length = -(-count // step) * step
    while any(_share(length, threads, grain) % LANES for grain in GRAINS):
        length += step
    return length


def _share(length: int, threads: int, grain: int) -> int:
    """The number of elements that at::parallel_for gives to each thread but the last."""
    return -(-length // max(1, min(threads, -(-length // grain))))
