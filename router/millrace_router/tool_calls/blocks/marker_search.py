"""Finds markers in text that may end within one."""

from __future__ import annotations

import functools
import re


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
