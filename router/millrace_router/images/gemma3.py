"""The square to which Gemma 3 brings a picture, and the text that stands for it in a prompt. Pure."""

from __future__ import annotations

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
SOFT, START, END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareGeometry(UsualGeometry):
    """A picture of any size becomes one square."""

    family: str
    edge: int
    """Of the square, in pixels."""
    most_tiles: ClassVar[int] = 1
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
    def most_bytes(self) -> int:
        """The bytes of a picture."""
        return 3 * self.edge * self.edge


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaGeometry(SquareGeometry):
    """The settings of a processor."""

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
        if processor.get("do_pan_and_scan") not in {None, False}:
            raise GeometryError("`do_pan_and_scan` has to be false")
        return cls(family=family, edge=square_edge(processor))

    def expansion(self, rows: int, columns: int, rows_per_tile: int) -> str:  # noqa: ARG002
        """Return the text in place of the template's placeholder, as the processor."""
        return f"\n\n{START}{SOFT * rows_per_tile}{END}\n\n"


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
