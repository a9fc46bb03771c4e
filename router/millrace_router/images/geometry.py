"""The sizes to which Idefics 3 and SmolVLM bring a picture, and the text that stands for it in a prompt. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, Self

from millrace_router.request.images import Detail, GridReduction, Rows

FAMILIES = frozenset({"idefics3", "smolvlm"})
MAX_EDGE = 4096
"""Longest edge of a resized picture, whatever the model's files say."""
MAX_RATIO = 200
"""Largest ratio of the sides."""
IMAGE = "<image>"
AROUND = "<fake_token_around_image>"
GLOBAL = "<global-img>"
_LANCZOS = 1
_FILTERS = {1: "LANCZOS", 2: "BILINEAR", 3: "BICUBIC"}
_DEFAULT_TILE = 364


class GeometryError(Exception):
    """The model's processor does something that is not known here; the message names it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a picture on its way to tiles, all (height, width) in pixels."""

    resized: tuple[tuple[int, int], ...]
    """The sizes to which it is resized, one after the other; the tiles are cut from the last."""
    rows: int
    """Rows of tiles; 0 for a picture that is one tile."""
    columns: int
    tile: tuple[int, int]
    """The size of each tile."""
    is_grid: bool = False
    """Whether the picture is one tile of any size; then rows and columns count features."""
    is_padded: bool = False
    """Whether the grid is padded with black around the resized picture, if it is smaller, and the tile that shows the
    whole picture is resized from the picture as it came; the placement of features may then depend on the picture's
    size."""
    is_cropped: bool = False
    """Whether the first tile shows the whole picture, and the others are cut from it as it came, the last ones of rows
    and columns maybe smaller, before each is resized."""
    square: tuple[int, ...] | None = None
    """The colour of the borders that make the picture a square before it is resized; None: there are none."""

    @property
    def num_tiles(self) -> int:
        """The tiles, with the one that shows the whole picture, the last."""
        return 1 if self.is_grid else self.rows * self.columns + 1


class AnyGeometry(Protocol):
    """The settings of a processor, which pickle as JSON."""

    resample: ClassVar[int]
    """Pillow's number of the filter."""
    placeholder: ClassVar[str]
    """The control token that the template writes once for each picture."""
    around: ClassVar[tuple[str, str]]
    """Texts before and after a picture in a prompt without a template."""
    framed: ClassVar[tuple[str, str]]
    """Texts behind the last picture and at the end of a prompt without a template, which then has no further special
    tokens; empty: none are added."""
    needed_tokens: ClassVar[tuple[str, ...]]
    """Control tokens without which the text for a picture would not be its tokens; the first stands for a feature."""
    has_one_grid: ClassVar[bool]
    """Whether only a request with one picture has it in several tiles; several pictures have the detail `low`."""

    @property
    def family(self) -> str:
        """The `model_type` of config.json."""

    @classmethod
    def of(cls, family: str, processor: Mapping[str, Any]) -> Self:
        """Read preprocessor_config.json; raises GeometryError."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `as_json` returned."""

    def as_json(self) -> dict[str, Any]:
        """Return all settings."""

    def layout(self, height: int, width: int, detail: Detail = "auto") -> Layout:
        """Return the layout of a picture of this size in pixels."""

    def expansion(self, rows: int, columns: int, rows_per_tile: int) -> str:
        """Return the text in place of the placeholder, with `rows_per_tile` of them for each tile."""

    def order(self, size: tuple[int, int], layout: tuple[int, int], rows_per_tile: int) -> Rows:
        """Return `PreparedImage.order` of a picture of `size`, whose tiles are in `layout` rows and columns."""

    def reduction(
        self, size: tuple[int, int], layout: tuple[int, int], rows_per_tile: int
    ) -> GridReduction | None:
        """Return `PreparedImage.reduction` of such a picture."""

    @property
    def most_tiles(self) -> int:
        """The most tiles that a picture of any size has."""

    @property
    def unit(self) -> int:
        """Pixels of a side of a tile, or of the square for which a feature stands if pictures have any size."""

    @property
    def most_rows(self) -> int:
        """The most features of a tile; 0 if the model says how many all have."""

    @property
    def most_bytes(self) -> int:
        """The most bytes that a picture of any size has."""


class UsualGeometry:
    """What most processors share: pictures with all features in the order of tiles, and no text around them."""

    __slots__ = ()
    around: ClassVar[tuple[str, str]] = "", ""
    framed: ClassVar[tuple[str, str]] = "", ""
    has_one_grid: ClassVar[bool] = False

    def order(self, size: tuple[int, int], layout: tuple[int, int], rows_per_tile: int) -> Rows:  # noqa: ARG002
        """Return the usual order."""
        return ()

    def reduction(
        self,
        size: tuple[int, int],  # noqa: ARG002
        layout: tuple[int, int],  # noqa: ARG002
        rows_per_tile: int,  # noqa: ARG002
    ) -> GridReduction | None:
        """Return None: features stay as they are."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry(UsualGeometry):
    """The settings of a processor. Every tile is a square."""

    family: str
    longest_edge: int
    """The longer edge of a picture after its first resize, which also enlarges."""
    tile: int
    """Edge of a tile in pixels."""
    splits: bool = True
    resample: ClassVar[int] = _LANCZOS
    placeholder: ClassVar[str] = IMAGE
    needed_tokens: ClassVar[tuple[str, ...]] = IMAGE, AROUND, GLOBAL
    most_rows: ClassVar[int] = 0

    @classmethod
    def of(cls, family: str, processor: Mapping[str, Any]) -> Self:
        """Read preprocessor_config.json, where what is absent has the default of the class in transformers.

        Raises:
            GeometryError: a setting is not supported.

        """
        if family not in FAMILIES:
            raise GeometryError(f"pictures of the family {family[:100]!r} are not supported")
        tile = _edge(processor, "max_image_size", _DEFAULT_TILE)
        check_flags(processor, resample=_LANCZOS)
        splits = processor.get("do_image_splitting", True)
        if not isinstance(splits, bool):
            raise GeometryError("`do_image_splitting` has to be true or false")
        longest = _edge(processor, "size", 4 * _DEFAULT_TILE)
        return cls(family=family, longest_edge=longest, tile=tile, splits=splits)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `as_json` returned."""
        return cls(**value)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def layout(self, height: int, width: int, detail: Detail = "auto") -> Layout:
        """Return the layout of a picture of this size in pixels, as the processor's, to the pixel."""
        first = _bounded(*_with_longest_edge(height, width, self.longest_edge))
        if detail == "low" or not self.splits:
            return Layout((first, (self.tile, self.tile)), 0, 0, tile=(self.tile, self.tile))
        last = _multiples(*first, self.tile)
        if max(last) <= self.tile:
            return Layout((first, last), 0, 0, tile=(self.tile, self.tile))
        rows, columns = last[0] // self.tile, last[1] // self.tile
        return Layout((first, last), rows, columns, tile=(self.tile, self.tile))

    def expansion(self, rows: int, columns: int, rows_per_tile: int) -> str:
        """Return the text in place of the template's placeholder, as the processor."""
        return expansion(rows, columns, rows_per_tile)

    @property
    def unit(self) -> int:
        return self.tile

    @property
    def most_bytes(self) -> int:
        """The most bytes of a picture of any size."""
        return self.most_tiles * 3 * self.tile * self.tile

    @property
    def most_tiles(self) -> int:
        """The most tiles that a picture of any size has."""
        if not self.splits:
            return 1
        per_edge = -(-min(self.longest_edge, MAX_EDGE) // self.tile)
        return per_edge * per_edge + (per_edge > 1)


def expansion(rows: int, columns: int, rows_per_tile: int) -> str:
    """Return the text for a picture in a prompt, with `rows_per_tile` placeholders for each tile, as the processor."""
    placeholders = IMAGE * rows_per_tile
    whole = f"{AROUND}{GLOBAL}{placeholders}{AROUND}"
    if not rows:
        return whole
    lines = (
        "".join(
            f"{AROUND}<row_{row}_col_{column}>{placeholders}" for column in range(1, columns + 1)
        )
        for row in range(1, rows + 1)
    )
    return "\n".join([*lines, "", whole])


def check_flags(processor: Mapping[str, Any], *, resample: int) -> None:
    """Refuse a processor that leaves a step out, or resizes by another filter; raises GeometryError."""
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if processor.get(name, True) is not True:
            raise GeometryError(f"`{name}` has to be true")
    if processor.get("resample", resample) != resample:
        raise GeometryError(f"`resample` has to be {resample}, which is {_FILTERS[resample]}")


def _edge(processor: Mapping[str, Any], name: str, default: int) -> int:
    size = processor.get(name, {"longest_edge": default})
    edge = size.get("longest_edge") if isinstance(size, dict) else None
    if not isinstance(edge, int) or isinstance(edge, bool) or not 1 <= edge <= MAX_EDGE:
        raise GeometryError(f"`{name}` has to have a `longest_edge` of 1 to {MAX_EDGE} pixels")
    return edge


def _with_longest_edge(height: int, width: int, longest: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return max(short + short % 2, 1), longest
    short = int(longest * ratio)
    return longest, max(short + short % 2, 1)


def _bounded(height: int, width: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        return max(int(MAX_EDGE / ratio), 1), MAX_EDGE
    if height > width and height > MAX_EDGE:
        return MAX_EDGE, max(int(MAX_EDGE * ratio), 1)
    return height, width


def _multiples(height: int, width: int, tile: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / ratio) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * ratio) / tile) * tile
