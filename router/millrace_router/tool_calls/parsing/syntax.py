"""The texts around calls, and the search for them in text that may end within one."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """The parts around a call. Blanks are allowed between any two parts."""

    openers: tuple[str, ...] = ()
    """Texts before calls, anywhere in the answer."""
    closers: tuple[str, ...] = ()
    """Texts that may follow a call."""
    separators: str = ""
    """Characters of which one may separate two calls."""
    bare: bool = False
    """Whether a call may begin the answer or a line without an opener."""
    lists: bool = False
    """Whether calls may be in a JSON array."""
    names: bool = False
    """Whether a call may be a name and then its arguments: Mistral's `name[ARGS]{…}`."""
    hidden: frozenset[str] = frozenset()
    """Special tokens that clients never get as text."""


def earliest(text: str, sought: Collection[str], start: int) -> tuple[int, str] | None:
    """Position and text of the first of `sought` from `start` on; the longest, if several begin at one position."""
    starts = [(text.find(one, start), -len(one), one) for one in sought]
    matches = [match for match in starts if match[0] >= 0]
    if not matches:
        return None
    first, _, one = min(matches)
    return first, one


def num_begun(text: str, sought: Collection[str]) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of one of `sought`."""
    longest = max(map(len, sought), default=1) - 1
    for num in range(min(longest, len(text)), 0, -1):
        if any(one.startswith(text[-num:]) for one in sought):
            return num
    return 0


def any_of(markers: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of any of `markers`, the longest first; of nothing if there are none."""
    ordered = sorted(markers, key=lambda marker: (-len(marker), marker))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


@functools.lru_cache(maxsize=256)
def marker_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of any of `markers`, the longest first, or of the beginning of one at the end of the text."""
    ordered = sorted(markers, key=lambda marker: (-len(marker), marker))
    # Without markers, it matches nothing.
    return re.compile("|".join(map(_begun, ordered)) or r"(?!)")


def _begun(marker: str) -> str:
    rest = ""
    for char in reversed(marker[1:]):
        rest = rf"(?:\Z|{re.escape(char)}{rest})"
    return re.escape(marker[0]) + rest
