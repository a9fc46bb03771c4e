"""The memory of adapters, counted in pages."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from millrace_shard.kernels.lora.lora_site import LoraPart
from millrace_shard.kernels.lora.packed_adapter import DEPTH, SLICE

PAGE_BYTES = 1 << 16
FACTOR_BYTES = 4


def bytes_per_slice(part: LoraPart, dtype: torch.dtype) -> int:
    """Memory on this rank for 16 ranks of a module: A, B and factors. A bias needs less and counts as much."""
    inputs, outputs = rounded_up(part.num_inputs, DEPTH), rounded_up(part.num_outputs, SLICE)
    return SLICE * ((inputs + outputs) * dtype.itemsize + FACTOR_BYTES)


def num_slices(rank: int) -> int:
    """Slices of a module of an adapter with `rank` ranks."""
    return -(-rank // SLICE)


def num_pages(slices: Iterable[tuple[LoraPart, int]], dtype: torch.dtype) -> int:
    """Pages of an adapter, whose modules have these numbers of slices, one more with a bias."""
    total = sum(count * bytes_per_slice(part, dtype) for part, count in slices)
    return -(-total // PAGE_BYTES)


def rounded_up(count: int, multiple: int) -> int:
    """The least multiple that is at least `count`."""
    return -(-count // multiple) * multiple
