"""The tiles that LLaVA 1.5 and LLaVA-NeXT make of a picture, and the order of their features in a prompt. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from millrace_router.images.geometry import (
    IMAGE,
    MAX_EDGE,
    GeometryError,
    Layout,
    UsualGeometry,
    check_flags,
)
from millrace_router.request.images import Detail, Rows

FAMILIES = ("llava", "llava_next")
BICUBIC = 3
Grids = tuple[tuple[int, int], ...]
"""(height, width) in pixels."""
_DEFAULT_EDGE = 224
_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaGeometry(UsualGeometry):
    """The settings of a processor. Every tile is a square."""

    family: str
    edge: int
    """Of a tile, in pixels."""
    shortest: int = 0
    """The shorter edge of a picture of LLaVA 1.5, from whose middle the tile is cut; 0 for LLaVA-NeXT."""
    grids: Grids = ()
    """The sizes of LLaVA-NeXT's grids of tiles, (height, width) in pixels."""
    resample: ClassVar[int] = BICUBIC
    placeholder: ClassVar[str] = IMAGE
    needed_tokens: ClassVar[tuple[str, ...]] = (IMAGE,)
    most_rows: ClassVar[int] = 0

    @classmethod
    def of(cls, family: str, processor: Mapping[str, Any]) -> Self:
        """Read preprocessor_config.json, where what is absent has the default of the class in transformers.

        Raises:
            GeometryError: a setting is not supported.

        """
        check_flags(processor, resample=BICUBIC)
        if processor.get("do_center_crop", True) is not True:
            raise GeometryError("`do_center_crop` has to be true")
        crop = _edges(processor, "crop_size", ("height", "width"))
        (shortest,) = _edges(processor, "size", ("shortest_edge",))
        if crop[0] != crop[1] or shortest < crop[0]:
            raise GeometryError("`crop_size` has to be a square not larger than `size`")
        if family == "llava_next":
            if shortest != crop[0]:
                raise GeometryError("`crop_size` has to be as large as `size`")
            return cls(family=family, edge=crop[0], grids=grids_of(processor, crop[0], _GRIDS))
        if processor.get("do_pad"):
            raise GeometryError("`do_pad` has to be false")
        return cls(family=family, edge=crop[0], shortest=shortest)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `as_json` returned."""
        grids = tuple((height, width) for height, width in value["grids"])
        return cls(**{**value, "grids": grids})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def layout(self, height: int, width: int, detail: Detail = "auto") -> Layout:
        """Return the layout of a picture of this size in pixels, as the processor's, to the pixel."""
        tile = self.edge, self.edge
        if self.shortest:
            long = int(self.shortest * max(height, width) / min(height, width))
            resized = (long, self.shortest) if width <= height else (self.shortest, long)
            return Layout((resized,), 0, 0, tile=tile)
        if detail == "low":
            return Layout((tile,), 0, 0, tile=tile)
        tall, wide = self._grid_for(height, width)
        by_width, by_height = wide / width, tall / height
        if by_width < by_height:
            resized = min(math.ceil(height * by_width), tall), wide
        else:
            resized = tall, min(math.ceil(width * by_height), wide)
        rows, columns = tall // self.edge, wide // self.edge
        return Layout((resized,), rows, columns, tile=tile, is_padded=True)

    def expansion(self, rows: int, columns: int, rows_per_tile: int) -> str:
        """Return the placeholders of a picture in the usual order."""
        return IMAGE * ((rows * columns + 1) * rows_per_tile + bool(self.grids))

    def order(self, size: tuple[int, int], layout: tuple[int, int], rows_per_tile: int) -> Rows:
        """Return the whole picture's features, then rows of the grid without padding, each with its end."""
        rows, columns = layout
        if not rows:
            return ()
        count, side = rows * columns, math.isqrt(rows_per_tile)
        tall, wide = rows * side, columns * side
        top, left = padding(size, tall, wide)
        end, order = (count + 1) * rows_per_tile, [(count * rows_per_tile, rows_per_tile)]
        for y in range(top, tall - top):
            for column in range(columns):
                first = max(left, column * side)
                last = min(wide - left, (column + 1) * side)
                if first < last:
                    tile = y // side * columns + column
                    at = y % side * side + first - column * side
                    order.append((tile * rows_per_tile + at, last - first))
            order.append((end, 1))
        return tuple(order)

    @property
    def unit(self) -> int:
        return self.edge

    @property
    def most_tiles(self) -> int:
        """The most tiles that a picture of any size has."""
        return 1 + max((tall * wide // self.edge**2 for tall, wide in self.grids), default=0)

    @property
    def most_bytes(self) -> int:
        """The most bytes of a picture of any size."""
        return self.most_tiles * 3 * self.edge * self.edge

    def _grid_for(self, height: int, width: int) -> tuple[int, int]:
        """Return the grid that keeps most of a picture's pixels, of equal ones that with the least padding."""

        def kept(grid: tuple[int, int]) -> tuple[int, int]:
            tall, wide = grid
            scale = min(wide / width, tall / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, pixels - tall * wide

        return max(self.grids, key=kept)


def padding(size: tuple[int, int], tall: int, wide: int) -> tuple[int, int]:
    """Return rows and columns of patches on each side of a grid that show no part of a picture of `size`."""
    height, width = size
    if width / height > wide / tall:
        return (tall - int(round(height * (wide / width), 7))) // 2, 0
    return 0, (wide - int(round(width * (tall / height), 7))) // 2


def _edges(processor: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> tuple[int, ...]:
    size = processor.get(name, dict.fromkeys(keys, _DEFAULT_EDGE))
    edges = tuple(_whole(size.get(key) if isinstance(size, dict) else None) for key in keys)
    if not all(1 <= edge <= MAX_EDGE for edge in edges):
        raise GeometryError(f"`{name}` has to have {', '.join(keys)} of 1 to {MAX_EDGE} pixels")
    return edges


def grids_of(processor: Mapping[str, Any], edge: int, default: Grids) -> Grids:
    """Return the sizes of grids of tiles with so many pixels a side; raises GeometryError."""
    grids = tuple(_pairs(processor.get("image_grid_pinpoints", default)))
    sides = [side for grid in grids for side in grid]
    if not sides or any(side % edge or not edge <= side <= MAX_EDGE for side in sides):
        raise GeometryError(
            f"`image_grid_pinpoints` has to have sizes that are multiples of {edge} pixels"
        )
    return grids


def _pairs(value: object) -> Iterator[tuple[int, int]]:
    for pair in value if isinstance(value, (list, tuple)) else [()]:
        match pair:
            case [height, width]:
                yield _whole(height), _whole(width)
            case _:
                yield 0, 0


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
