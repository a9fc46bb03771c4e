"""Pictures of a prompt: where they come from, what is made of them, and which of the prompt's tokens they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


class Mask(Enum):
    """Which later tokens the tokens of a prompt attend to, so that no chunk may end before these."""

    CAUSAL = "causal"
    IMAGE = "image"
    """Those of a span of placeholders to all of it."""
    PROMPT = "prompt"
    """Those of a prompt, without generated ones, to all of it."""


Detail = Literal["auto", "low"]
"""`low` makes one tile, or a small picture, of one of any size."""
FEATURES_PER_COST = 256
"""Features of a picture of any size that count as one tile in costs."""


Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class GridReduction:
    """Replaces the features of a grid of tiles with fewer ones, which take the first rows."""

    columns: int
    """Tiles of a row of the grid."""
    top: int
    """Rows of features that are left out at the top, and as many at the bottom."""
    left: int
    """Columns of features that are left out on the left, and as many on the right."""
    rows: int
    """To which the others are resampled, bilinearly."""
    row_size: int
    """Features of such a row."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A picture as a client names it."""

    url: str
    """A `data:` URL, or an address."""
    part: str
    """Where it is in the client's body, such as `messages.3.content.1`."""
    detail: Detail = "auto"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedImage:
    """A picture in tiles of one size."""

    digest: bytes
    """SHA-256 of its tiles, their layout, and the settings of the processor."""
    rows: int
    """Rows of tiles, or of features if `is_grid`; 0 if it is one tile."""
    columns: int
    num_tiles: int
    height: int
    """Of a tile, in pixels."""
    width: int
    rows_per_tile: int
    """Rows of features, and placeholders in the prompt, that each tile has."""
    pixels: bytes = field(repr=False)
    """uint8 [num_tiles, 3, height, width]."""
    is_grid: bool = False
    """Whether it is one tile of any size, whose features are a grid of `rows` and `columns`."""
    extra_rows: int = 0
    """Rows of features behind its tiles' rows."""
    order: Rows = ()
    """The rows of features for its placeholders, as (first row, count); empty: all rows, one after the other."""
    reduction: GridReduction | None = None
    """What becomes of the features of all tiles but the last; None: they stay as they are."""

    @property
    def tile_cost(self) -> float:
        """Tiles of the cost model that a tile costs: a picture of any size costs by its features."""
        return self.rows_per_tile / FEATURES_PER_COST if self.is_grid else 1.0

    @property
    def num_rows(self) -> int:
        """Its rows of features."""
        return self.num_tiles * self.rows_per_tile + self.extra_rows

    @property
    def placed_rows(self) -> Rows:
        """The rows of features for its placeholders, in their order."""
        return self.order or ((0, self.num_rows),)

    @property
    def num_tokens(self) -> int:
        """Its placeholders."""
        return sum(count for _, count in self.placed_rows)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Successive placeholders of a picture in a prompt."""

    position: int
    """Index of the first placeholder in the prompt."""
    tokens: int
    image: PreparedImage
    row: int
    """The picture's row of features for the first of them."""

    @property
    def end(self) -> int:
        return self.position + self.tokens


def spans_of(
    input_ids: Sequence[int], image_token_id: int, images: Sequence[PreparedImage]
) -> tuple[ImageSpan, ...]:
    """Find the placeholders of `images`, which are in the prompt in their order.

    Raises:
        ValueError: the prompt has more of them than the pictures, or fewer.

    """
    runs = list(_runs(input_ids, image_token_id))
    if sum(length for _, length in runs) != sum(image.num_tokens for image in images):
        raise ValueError("the prompt has more or fewer placeholders than its images")
    spans: list[ImageSpan] = []
    pieces = ((image, row, count) for image in images for row, count in image.placed_rows)
    image, row, left = next(pieces, (None, 0, 0))
    for start, length in runs:
        position = start
        while position < start + length:
            if not left:
                image, row, left = next(pieces)
            assert image is not None
            count = min(start + length - position, left)
            spans.append(ImageSpan(position, count, image, row))
            position, row, left = position + count, row + count, left - count
    return tuple(spans)


def _runs(input_ids: Sequence[int], image_token_id: int) -> Iterator[tuple[int, int]]:
    """Yield (position, length) of each uninterrupted run of placeholders."""
    start = None
    for position, token_id in enumerate(input_ids):
        if token_id == image_token_id:
            start = position if start is None else start
        elif start is not None:
            yield start, position - start
            start = None
    if start is not None:
        yield start, len(input_ids) - start
