"""The squares to which Gemma 3 brings a picture and its parts, and the text that stands for them. Pure."""

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

FAMILIES = ("gemma3",)
_DEFAULT_EDGE = 224
_BILINEAR = 2
MOST_CROPS = 63
_SCAN = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""Defaults of the processor with which the model is used."""
SOFT, START, END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareGeometry(UsualGeometry):
    """A picture of any size becomes one square."""

    family: str
    edge: int
    """Of the square, in pixels."""
    most_rows: ClassVar[int] = 0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `as_json` returned."""
        return cls(**value)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def layout(self, height: int, width: int, detail: Detail = "auto") -> Layout:  # noqa: ARG002
        """Return the same layout for a picture of any size."""
        size = self.edge, self.edge
        return Layout((size,), 0, 0, tile=size)

    @property
    def unit(self) -> int:
        return self.edge

    @property
    def most_tiles(self) -> int:
        return 1

    @property
    def most_bytes(self) -> int:
        """The most bytes of a picture."""
        return self.most_tiles * 3 * self.edge * self.edge


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaGeometry(SquareGeometry):
    """The settings of a processor. With pan and scan, a long picture is followed by its parts."""

    most_crops: int = 0
    """0: without pan and scan."""
    least_crop: int = 1
    """The shortest side of a part, in pixels."""
    least_ratio: float = 1.0
    """Of the sides of a picture that is long enough."""
    resample: ClassVar[int] = _BILINEAR
    placeholder: ClassVar[str] = START
    needed_tokens: ClassVar[tuple[str, ...]] = SOFT, START, END

    @classmethod
    def of(cls, family: str, processor: Mapping[str, Any]) -> Self:
        """Read preprocessor_config.json, where what is absent has the default of the class in transformers.

        Raises:
            GeometryError: a setting is not supported.

        """
        check_flags(processor, resample=_BILINEAR)
        edge, is_scanned = square_edge(processor), processor.get("do_pan_and_scan")
        if not is_scanned:
            return cls(family=family, edge=edge)
        least, most, ratio = (processor.get(name, default) for name, default in _SCAN.items())
        # Each part has at least a pixel then, too.
        if not isinstance(most, int) or not 2 <= most <= MOST_CROPS:
            raise GeometryError(
                f"`pan_and_scan_max_num_crops` has to be a whole number from 2 to {MOST_CROPS}"
            )
        if not isinstance(least, int) or least < most:
            raise GeometryError(
                f"`pan_and_scan_min_crop_size` has to be a whole number of pixels from {most} on"
            )
        if not isinstance(ratio, int | float) or ratio < 1:
            raise GeometryError("`pan_and_scan_min_ratio_to_activate` has to be a number from 1 on")
        return cls(
            family=family,
            edge=edge,
            most_crops=most,
            least_crop=least,
            least_ratio=float(ratio),
        )

    def layout(self, height: int, width: int, detail: Detail = "auto") -> Layout:
        """Return the layout of a picture of this size in pixels, as the processor's."""
        size, short, long = (self.edge, self.edge), *sorted((height, width))
        count = min(long // max(1, self.least_crop), math.floor(long / short + 0.5))
        count = min(self.most_crops, max(2, count))
        if (
            not self.most_crops
            or detail == "low"
            or long / short < self.least_ratio
            or min(short, math.ceil(long / count)) < self.least_crop
        ):
            return Layout((size,), 0, 0, tile=size)
        rows, columns = (1, count) if width >= height else (count, 1)
        return Layout((size,), rows, columns, tile=size, is_cropped=True)

    def expansion(self, rows: int, columns: int, rows_per_tile: int) -> str:
        """Return the text in place of the template's placeholder, as the processor."""
        one = f"\n\n{START}{SOFT * rows_per_tile}{END}\n\n"
        if not rows:
            return one
        crops = " ".join([one] * (rows * columns))
        return f"Here is the original image {one} and here are some crops to help you see better {crops}"

    @property
    def most_tiles(self) -> int:
        """The picture, and the most parts."""
        return 1 + self.most_crops


def square_edge(processor: Mapping[str, Any]) -> int:
    """Return the edge of the square that `size` describes, in pixels; raises GeometryError."""
    size = processor.get("size", {"height": _DEFAULT_EDGE, "width": _DEFAULT_EDGE})
    names = "height", "width"
    height, width = (size.get(name) if isinstance(size, dict) else None for name in names)
    if not isinstance(height, int) or isinstance(height, bool) or not 1 <= height <= MAX_EDGE:
        raise GeometryError(f"`size` has to have a `height` of 1 to {MAX_EDGE} pixels")
    if width != height:
        raise GeometryError("`size` has to be a square")
    return height
