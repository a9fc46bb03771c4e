"""Makes the features of a large grid of tiles fewer, as LLaVA-OneVision does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.vision.spec import VisionSpec


@dataclass(frozen=True, slots=True)
class GridReduction:
    """Leaves out the padding of a grid of features, and resamples the others bilinearly."""

    columns: int
    """Tiles of a row of the grid."""
    top: int
    """Rows of features that are left out at the top, and as many at the bottom."""
    left: int
    """Columns of features that are left out on the left, and as many on the right."""
    rows: int
    """Of the result."""
    row_size: int
    """Features of such a row."""

    def refusal(self, spec: VisionSpec, num_tiles: int) -> str | None:
        """Why a model with `spec` does not do this to the features of `num_tiles` tiles; None if it does."""
        if not spec.max_grid_tiles:
            return "features of tiles are not resampled by this model"
        side = math.isqrt(spec.rows_per_tile)
        if not self.columns or num_tiles % self.columns or not num_tiles:
            return f"{num_tiles} tiles are not a grid of {self.columns} columns"
        tall, wide = (
            num_tiles // self.columns * side - 2 * self.top,
            self.columns * side - 2 * self.left,
        )
        if not 0 < self.rows <= tall or not 0 < self.row_size <= wide:
            return f"{tall} x {wide} features do not become {self.rows} x {self.row_size}"
        return None

    def of(self, grid: Tensor) -> Tensor:
        """[rows * row_size, hidden] of the features [tiles, features of a tile, hidden] of all tiles.

        The bits of a feature depend only on the four that it is made of.
        """
        count, columns = grid.shape[1], self.columns
        side = math.isqrt(count)
        y, down = _neighbours(len(grid) // columns * side, self.top, self.rows)
        x, right = _neighbours(columns * side, self.left, self.row_size)
        y = y.T[:, :, None, None]
        index = (y // side * columns + x // side) * count + y % side * side + x % side
        corners = upload(index, grid.device)
        weight = upload(right.astype(np.float32), grid.device)[:, None]
        values, rows = grid.flatten(0, 1), []
        # One row at a time, as a large grid in float32 takes much memory.
        for corner, share in zip(corners, down.tolist(), strict=True):
            above, below = values[corner].float()
            left, beyond = _between(above, below, share)
            rows.append(_between(left, beyond, weight).to(grid.dtype))
        return torch.cat(rows)


def _between(first: Tensor, second: Tensor, weight: Tensor | float) -> Tensor:
    return first * (1 - weight) + second * weight


def _neighbours(count: int, left_out: int, to: int) -> tuple[Ints, NDArray[np.float64]]:
    """The points [2, to] of `count` ones before and after each of `to` ones, and the weights [to] of the latter.

    `left_out` points at each end are not used.
    """
    used = count - 2 * left_out
    at = np.maximum((np.arange(to) + 0.5) * (used / to) - 0.5, 0.0)
    before = at.astype(np.int64)
    pair = np.stack([before, np.minimum(before + 1, used - 1)])
    return pair + left_out, at - before
