"""The texts of all tokens as one string, so that a text is sought in all of them at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

SEPARATOR = "\U0010ffff"
"""A noncharacter, which Unicode keeps out of texts."""


class TokenTexts:
    """The texts of the tokens 0, 1, …"""

    def __init__(self, texts: Iterable[str]) -> None:
        parts = [text.replace(SEPARATOR, "") + SEPARATOR for text in texts]
        self._whole = "".join(parts)
        self._starts = list(accumulate(map(len, parts), initial=0))

    def having(self, part: str) -> Iterator[int]:
        """Yield the tokens whose text contains `part`, which is not empty."""
        if SEPARATOR in part:
            return
        place = self._whole.find(part)
        while place >= 0:
            token = bisect_right(self._starts, place) - 1
            yield token
            place = self._whole.find(part, self._starts[token + 1])
