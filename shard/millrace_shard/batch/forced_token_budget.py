"""The budget of forced tokens: positions that decodes fill beyond one each in a step."""

from __future__ import annotations

import numpy as np

from millrace_shard.arrays import Ints

CPU_TILE = 16
"""Rows of a tile of the matrix unit: one row in another tile lengthens a step by about as much as a full tile."""


def within_budget(extras: Ints, *, num_required: int, tile: int) -> Ints:
    """The part of `extras` [n] positions that a step with `num_required` other positions fills; the rest waits.

    All extras are filled if the last tile of rows has room, or if another tile is worth its cost: half full, or a
    quarter of the required positions. Otherwise the extras of the first rows fill the last tile, so that a few
    positions of one row do not delay all other rows. With a `tile` of 1 all extras are filled.
    """
    room, requested = -num_required % tile, int(extras.sum())
    if requested <= room or requested - room >= min(tile // 2, num_required // 4):
        return extras
    before = extras.cumsum() - extras
    return np.clip(room - before, 0, extras)
