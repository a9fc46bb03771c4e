"""What surrounds calls in a format, for the one parser of all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """Blanks may stand wherever one part ends and another begins."""

    openers: tuple[str, ...] = ()
    """Texts that calls follow, anywhere in the answer."""
    closers: tuple[str, ...] = ()
    """Texts that may follow a call."""
    separators: str = ""
    """Characters one of which may stand between two calls."""
    bare: bool = False
    """Whether a call may begin the answer, or another line, by itself."""
    lists: bool = False
    """Whether calls may be in a JSON array."""
    names: bool = False
    """Whether a call may be a name and then its arguments: Mistral's `name[ARGS]{…}`."""
    hidden: frozenset[str] = frozenset()
    """Special tokens that never are text for clients."""


def earliest(text: str, sought: Collection[str], start: int) -> tuple[int, str] | None:
    """Where the first of `sought` stands from `start` on, and which it is: of several at one place, the longest."""
    places = [(text.find(one, start), -len(one), one) for one in sought]
    found = [place for place in places if place[0] >= 0]
    if not found:
        return None
    first, _, one = min(found)
    return first, one


def num_begun(text: str, sought: Collection[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `sought`."""
    longest = max(map(len, sought), default=1) - 1
    for num in range(min(longest, len(text)), 0, -1):
        if any(one.startswith(text[-num:]) for one in sought):
            return num
    return 0
