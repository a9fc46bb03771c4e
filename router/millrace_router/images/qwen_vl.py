"""The sizes to which Qwen 2 VL, 2.5 VL, 3 VL and 3.5 bring a picture, and the text that stands for it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from millrace_router.images.geometry import (
    MAX_RATIO,
    GeometryError,
    Layout,
    UsualGeometry,
    check_flags,
)
from millrace_router.request.images import FEATURES_PER_COST, Detail

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
MOST_PIXELS = 1 << 26
"""Of a resized picture, whatever the model's files say."""
BICUBIC = 3
START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenGeometry(UsualGeometry):
    """The settings of a processor. A picture is one tile, whose sides are multiples of `cell`."""

    family: str
    cell: int
    """Pixels of a side of the square for which a feature stands."""
    min_pixels: int
    """Of a resized picture, roughly."""
    max_pixels: int
    resample: ClassVar[int] = BICUBIC
    placeholder: ClassVar[str] = PAD
    around: ClassVar[tuple[str, str]] = START, END
    needed_tokens: ClassVar[tuple[str, ...]] = PAD, START, END
    most_tiles: ClassVar[int] = 1

    @classmethod
    def of(cls, family: str, processor: Mapping[str, Any]) -> Self:
        """Read preprocessor_config.json, where what is absent has the default of the class in transformers.

        Raises:
            GeometryError: a setting is not supported.

        """
        check_flags(processor, resample=BICUBIC)
        size = processor.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        if not isinstance(size, dict):
            raise GeometryError("`size` has to have `shortest_edge` and `longest_edge`")
        # The older names come first, as in the class.
        least = _own(processor, "min_pixels", size.get("shortest_edge"))
        most = _own(processor, "max_pixels", size.get("longest_edge"))
        cell = _count("patch_size", processor.get("patch_size", 14), MOST_PIXELS) * _count(
            "merge_size", processor.get("merge_size", 2), MOST_PIXELS
        )
        return cls(
            family=family,
            cell=cell,
            min_pixels=_count("the least number of pixels", least, MOST_PIXELS),
            max_pixels=_count("the largest number of pixels", most, MOST_PIXELS),
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `as_json` returned."""
        return cls(**value)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def layout(self, height: int, width: int, detail: Detail = "auto") -> Layout:
        """Return the layout of a picture of this size in pixels, as the processor's, to the pixel."""
        tall, wide = self._resized(height, width, self._most_pixels(detail))
        size = tall, wide
        return Layout((size,), tall // self.cell, wide // self.cell, tile=size, is_grid=True)

    def expansion(self, rows: int, columns: int, rows_per_tile: int) -> str:  # noqa: ARG002
        """Return the text in place of the template's placeholder, as the processor."""
        return PAD * rows_per_tile

    @property
    def unit(self) -> int:
        return self.cell

    @property
    def most_bytes(self) -> int:
        """The most bytes of a picture of any size."""
        return 3 * self.cell * self.cell * self.most_rows

    @property
    def most_rows(self) -> int:
        """The most features of a picture of any size; sides are rounded up, at the largest ratio too."""
        longest = math.sqrt(MAX_RATIO * self.min_pixels) / self.cell + 1
        shortest = math.sqrt(self.min_pixels / MAX_RATIO) / self.cell + 1
        return max(
            self.max_pixels // self.cell**2,
            math.ceil(math.sqrt(MAX_RATIO * self.max_pixels) / self.cell),
            math.ceil(self.min_pixels / self.cell**2 + longest + shortest),
        )

    def _most_pixels(self, detail: Detail) -> int:
        if detail == "low":
            small = FEATURES_PER_COST * self.cell * self.cell
            return max(self.min_pixels, min(self.max_pixels, small))
        return self.max_pixels

    def _resized(self, height: int, width: int, most: int) -> tuple[int, int]:
        cell = self.cell
        tall, wide = round(height / cell) * cell, round(width / cell) * cell
        if tall * wide > most:
            beta = math.sqrt((height * width) / most)
            tall = max(cell, math.floor(height / beta / cell) * cell)
            wide = max(cell, math.floor(width / beta / cell) * cell)
        elif tall * wide < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            tall = math.ceil(height * beta / cell) * cell
            wide = math.ceil(width * beta / cell) * cell
        return tall, wide


def _own(processor: Mapping[str, Any], name: str, default: object) -> object:
    value = processor.get(name)
    return default if value is None else value


def _count(name: str, value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise GeometryError(f"{name} has to be a whole number from 1 to {most}, not {value!r:.100}")
    return value
