"""Pictures of numbers and short words in Pillow's own font, and which of the texts the reader is never shown."""

from __future__ import annotations

import random
import string
import zlib
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

SHORTEST, LONGEST = 2, 4
HELD_BACK_ONE_IN = 8
"""One text in this many is kept for tests."""
SHARE_OF_NUMBERS = 0.35
FONT_SIZES = range(18, 41)
MARGINS = range(2, 7)
"""Pixels."""
DARKEST_PAPER, LIGHTEST_INK = 170, 90
"""Values of each colour, from 0 to 255."""


class Picture(NamedTuple):
    """A picture and the text in it."""

    text: str
    image: Image.Image
    ends: tuple[float, ...]
    """Where each character ends, as a share of the width."""

    def character_at(self, share: float) -> str:
        """The character at a share of the width; the nearest one in a margin."""
        index = next((at for at, end in enumerate(self.ends) if share < end), -1)
        return self.text[index]


def is_held_back(text: str) -> bool:
    """Whether the reader is never trained with a text."""
    return zlib.crc32(text.encode()) % HELD_BACK_ONE_IN == 0


def random_picture(rng: random.Random, *, is_for_tests: bool, longest: int = LONGEST) -> Picture:
    """Draw some text of digits, or of lower-case letters."""
    while True:
        letters = string.digits if rng.random() < SHARE_OF_NUMBERS else string.ascii_lowercase
        text = "".join(rng.choices(letters, k=rng.randint(SHORTEST, longest)))
        if is_held_back(text) is is_for_tests:
            return draw(text, rng)


def draw(text: str, rng: random.Random) -> Picture:
    """Draw a text in some size, with some colours and margins."""
    font = ImageFont.load_default(rng.choice(FONT_SIZES))
    left, top, right, bottom = map(round, font.getbbox(text))
    before, above, behind, below = (rng.choice(MARGINS) for _ in range(4))
    size = (right - left + before + behind, bottom - top + above + below)
    paper, ink = _colour(rng, DARKEST_PAPER, 255), _colour(rng, 0, LIGHTEST_INK)
    image = Image.new("RGB", size, paper)
    ImageDraw.Draw(image).text((before - left, above - top), text, font=font, fill=ink)
    starts = [font.getlength(text[:count]) for count in range(1, len(text) + 1)]
    return Picture(text, image, tuple((before - left + end) / size[0] for end in starts))


def _colour(rng: random.Random, least: int, most: int) -> tuple[int, int, int]:
    return rng.randint(least, most), rng.randint(least, most), rng.randint(least, most)


def num_wrong(text: str, expected: str) -> int:
    """Return how many characters have to be changed, added or removed to get `expected`."""
    row = list(range(len(expected) + 1))
    for at, letter in enumerate(text, 1):
        diagonal, row[0] = row[0], at
        for column, other in enumerate(expected, 1):
            diagonal, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, diagonal + (letter != other)),
            )
    return row[-1]
