"""The sizes to which Pixtral and Mistral 3 bring a picture, and the text that stands for it in a prompt. Pure."""

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
from millrace_router.request.images import FEATURES_PER_COST, Detail

FAMILIES = ("pixtral", "mistral3")
BICUBIC = 3
IMG, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
_DEFAULT_SIZE = {"longest_edge": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralGeometry(UsualGeometry):
    """The settings of a processor. A picture is one tile, whose sides are multiples of `cell`."""

    family: str
    cell: int
    """Pixels of a side of the square for which a feature stands."""
    max_height: int
    """Of a picture before its sides are rounded up; only larger pictures are made smaller."""
    max_width: int
    resample: ClassVar[int] = BICUBIC
    placeholder: ClassVar[str] = IMG
    needed_tokens: ClassVar[tuple[str, ...]] = IMG, BREAK, END
    most_tiles: ClassVar[int] = 1

    @classmethod
    def of(cls, family: str, processor: Mapping[str, Any]) -> Self:
        """Read preprocessor_config.json, where what is absent has the default of the class in transformers.

        The class computes with the encoder's patches in place of the file's, so `cell` has to be added to it.

        Raises:
            GeometryError: a setting is not supported.

        """
        check_flags(processor, resample=BICUBIC)
        if processor.get("do_center_crop"):
            raise GeometryError("`do_center_crop` has to be false")
        size = processor.get("size") or _DEFAULT_SIZE
        sides = size if isinstance(size, dict) else {}
        longest = sides.get("longest_edge")
        names = ("height", "width") if longest is None else ("longest_edge", "longest_edge")
        height, width = (_side(sides.get(name)) for name in names)
        cell = _side(processor.get("cell"))
        return cls(family=family, cell=cell, max_height=height, max_width=width)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `as_json` returned."""
        return cls(**value)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def layout(self, height: int, width: int, detail: Detail = "auto") -> Layout:
        """Return the layout of a picture of this size in pixels, as the processor's, to the pixel."""
        small = math.isqrt(FEATURES_PER_COST) * self.cell if detail == "low" else MAX_EDGE
        tallest, widest = min(self.max_height, small), min(self.max_width, small)
        ratio = max(height / tallest, width / widest)
        if ratio > 1:
            height, width = (max(1, math.floor(side / ratio)) for side in (height, width))
        rows, columns = self._cells(height), self._cells(width)
        size = rows * self.cell, columns * self.cell
        return Layout((size,), rows, columns, tile=size, is_grid=True)

    def expansion(self, rows: int, columns: int, rows_per_tile: int) -> str:  # noqa: ARG002
        """Return the text in place of the template's placeholder, as the processor."""
        return BREAK.join([IMG * columns] * rows) + END

    @property
    def unit(self) -> int:
        return self.cell

    @property
    def most_rows(self) -> int:
        """The most features of a picture of any size."""
        return self._cells(self.max_height) * self._cells(self.max_width)

    @property
    def most_bytes(self) -> int:
        """The most bytes of a picture of any size."""
        return 3 * self.cell * self.cell * self.most_rows

    def _cells(self, side: int) -> int:
        return (side - 1) // self.cell + 1


def _side(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_EDGE:
        raise GeometryError(f"sides have to be whole numbers from 1 to {MAX_EDGE}")
    return value
