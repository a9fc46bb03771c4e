"""Caches whose values are all NaN, as the worst that a freed block may hold."""

from __future__ import annotations

import torch

from millrace_shard.kernels.base import LayerCache


def poison(cache: LayerCache) -> None:
    """Make every key and value NaN: int8 by its scales."""
    for each in cache.by_block:
        if each.dtype == torch.int8:
            each.fill_(127)
        else:
            each.copy_(torch.full((), torch.nan).to(each.dtype))
