"""The tiles that LLaVA-OneVision makes of a picture, and how it places their features in a prompt. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from millrace_router.images.gemma3 import square_edge
from millrace_router.images.geometry import GeometryError, Layout, check_flags
from millrace_router.images.llava import BICUBIC, LlavaGeometry, grids_of, padding
from millrace_router.request.images import Detail, GridReduction, Rows

FAMILIES = ("llava_onevision",)
MOST_TOO_LARGE = 1.1
"""How many times as long and as wide as the largest one a grid may be before its features become fewer."""
_SIZE = {"height": 384, "width": 384}
_SIDES = range(384, 2305, 384)
_GRIDS = tuple((tall, wide) for tall in _SIDES for wide in _SIDES)
_MEAN = (0.48145466, 0.4578275, 0.40821073)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnevisionGeometry(LlavaGeometry):
    """The settings of a processor. A picture with others in a request is one tile, with borders that make it square."""

    max_grid_tiles: int
    """Tiles of a grid as large as whose its features may be: 9 for "anyres_max_9"."""
    border: tuple[int, ...]
    """The colour of borders, the mean of pixels."""
    has_one_grid: ClassVar[bool] = True

    @classmethod
    def of(cls, family: str, processor: Mapping[str, Any]) -> Self:
        """Read preprocessor_config.json, where what is absent has the default of the class in transformers.

        The class has `max_grid_tiles` from another file, so it has to be added.

        Raises:
            GeometryError: a setting is not supported.

        """
        check_flags(processor, resample=BICUBIC)
        if processor.get("do_center_crop") or processor.get("crop_size"):
            raise GeometryError("`do_center_crop` and `crop_size` have to be absent")
        edge = square_edge({"size": processor.get("size") or _SIZE})
        mean = processor.get("image_mean", _MEAN)
        numbers = mean if isinstance(mean, (list, tuple)) else [mean] * 3
        if len(numbers) != 3 or not all(isinstance(each, (int, float)) for each in numbers):
            raise GeometryError("`image_mean` has to be three numbers")
        most = processor.get("max_grid_tiles")
        if not isinstance(most, int) or most < 1:
            raise GeometryError("`max_grid_tiles` has to be a whole number from 1 on")
        return cls(
            family=family,
            edge=edge,
            grids=grids_of(processor, edge, _GRIDS),
            max_grid_tiles=most,
            border=tuple(min(max(int(each * 255), 0), 255) for each in numbers),
        )

    def layout(self, height: int, width: int, detail: Detail = "auto") -> Layout:
        """Return the layout of a picture of this size in pixels, as the processor's, to the pixel."""
        if detail == "low":
            tile = self.edge, self.edge
            return Layout((tile,), 0, 0, tile=tile, square=tuple(self.border))
        return LlavaGeometry.layout(self, height, width, detail)

    def order(self, size: tuple[int, int], layout: tuple[int, int], rows_per_tile: int) -> Rows:
        """Return the whole picture's features, then rows of the grid without padding, each with its end."""
        reduced = self.reduction(size, layout, rows_per_tile)
        if reduced is None:
            return LlavaGeometry.order(self, size, layout, rows_per_tile)
        whole = math.prod(layout) * rows_per_tile
        order = [(whole, rows_per_tile)]
        for row in range(reduced.rows):
            order += [(row * reduced.row_size, reduced.row_size), (whole + rows_per_tile, 1)]
        return tuple(order)

    def reduction(
        self, size: tuple[int, int], layout: tuple[int, int], rows_per_tile: int
    ) -> GridReduction | None:
        """Return what makes the features of a large grid fewer, as the model does."""
        rows, columns = layout
        if not rows:
            return None
        side = math.isqrt(rows_per_tile)
        top, left = padding(size, rows * side, columns * side)
        tall, wide = rows * side - 2 * top, columns * side - 2 * left
        ratio = math.sqrt(tall * wide / (self.max_grid_tiles * side**2))
        if ratio <= MOST_TOO_LARGE:
            return None
        return GridReduction(columns, top, left, int(tall // ratio), int(wide // ratio))
