"""The tiles to which InternVL cuts a picture, and the text that stands for it in a prompt. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from millrace_router.images.geometry import (
    MAX_EDGE,
    GeometryError,
    Layout,
    UsualGeometry,
    check_flags,
)
from millrace_router.request.images import Detail

FAMILIES = ("internvl",)
BICUBIC = 3
MOST_TILES = 64
CONTEXT, BEGIN, END = "<IMG_CONTEXT>", "<img>", "</img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class InternGeometry(UsualGeometry):
    """The settings of a processor. Every tile is a square; several are followed by one with the whole picture."""

    family: str
    tile: int
    """Edge of a tile in pixels."""
    min_tiles: int
    """Without the tile that shows the whole picture."""
    max_tiles: int
    resample: ClassVar[int] = BICUBIC
    placeholder: ClassVar[str] = CONTEXT
    needed_tokens: ClassVar[tuple[str, ...]] = CONTEXT, BEGIN, END
    most_rows: ClassVar[int] = 0

    @classmethod
    def of(cls, family: str, processor: Mapping[str, Any]) -> Self:
        """Read preprocessor_config.json, where what is absent has the default of the class in transformers.

        `crop_to_patches` has no effect: the processor sets it to true.

        Raises:
            GeometryError: a setting is not supported.

        """
        check_flags(processor, resample=BICUBIC)
        size = processor.get("size") or {"height": 384, "width": 384}
        sides = [size.get(name) for name in ("height", "width")] if isinstance(size, dict) else []
        if len(sides) != 2 or sides[0] != sides[1]:
            raise GeometryError("`size` has to have an equal `height` and `width`")
        least, most = (processor.get(name) or count for name, count in _DEFAULTS.items())
        return cls(
            family=family,
            tile=_count("size", sides[0], MAX_EDGE),
            min_tiles=_count("min_patches", least, MOST_TILES),
            max_tiles=_count("max_patches", most, MOST_TILES),
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `as_json` returned."""
        return cls(**value)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def layout(self, height: int, width: int, detail: Detail = "auto") -> Layout:
        """Return the layout of a picture of this size in pixels, as the processor's."""
        one = self.max_tiles == 1 or detail == "low"
        columns, rows = (1, 1) if one else self._grid(height, width)
        size, tile = (rows * self.tile, columns * self.tile), (self.tile, self.tile)
        if rows * columns == 1:
            return Layout((size,), 0, 0, tile=tile)
        return Layout((size,), rows, columns, tile=tile, is_padded=True)

    def expansion(self, rows: int, columns: int, rows_per_tile: int) -> str:
        """Return the text in place of the template's placeholder, as the processor."""
        return f"{BEGIN}{CONTEXT * (rows_per_tile * (rows * columns + 1))}{END}"

    @property
    def unit(self) -> int:
        return self.tile

    @property
    def most_tiles(self) -> int:
        """The most tiles that a picture of any size has."""
        return self.max_tiles + (self.max_tiles > 1)

    @property
    def most_bytes(self) -> int:
        """The most bytes of a picture of any size."""
        return self.most_tiles * 3 * self.tile * self.tile

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows whose ratio is nearest; of several with it the last that is not more than twice as large."""
        sides = range(1, self.max_tiles + 1)
        grids = [(columns, rows) for columns in sides for rows in sides]
        grids = [grid for grid in grids if self.min_tiles <= math.prod(grid) <= self.max_tiles]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            difference = abs(width / height - columns / rows)
            covered = 0.5 * self.tile * self.tile * columns * rows
            if difference < least or (difference == least and width * height > covered):
                best, least = (columns, rows), difference
        return best


_DEFAULTS = {"min_patches": 1, "max_patches": 12}


def _count(name: str, value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise GeometryError(f"`{name}` has to be a whole number from 1 to {most}")
    return value
