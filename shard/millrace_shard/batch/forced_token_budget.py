"""How many of the positions that decodes may fill beyond one each a step really fills."""

from __future__ import annotations

import numpy as np

from millrace_shard.arrays import Ints

CPU_TILE = 16
"""Rows of a tile of the matrix unit: a further tile lengthens a step by about as much for one row as for all."""


def affordable(extras: Ints, *, num_firm: int, tile: int) -> Ints:
    """What of `extras` [n] is filled in a step that computes `num_firm` positions in any case; the rest waits.

    All of them where the last tile of rows has room, or where a further tile is worth it: half full, or a quarter of
    what the step computes anyway. Otherwise as many as there is room for, those of the first rows first, so that
    a few positions of one row do not hold up all others. With a `tile` of 1 nothing waits.
    """
    room, wanted = -num_firm % tile, int(extras.sum())
    if wanted <= room or wanted - room >= min(tile // 2, num_firm // 4):
        return extras
    before = extras.cumsum() - extras
    return np.clip(room - before, 0, extras)
