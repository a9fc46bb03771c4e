"""A log on a terminal whose last line may be a bar that tells how far a download is."""

from __future__ import annotations

import logging
import shutil
from typing import TextIO

NUM_CELLS = 20
START_OF_LINE = "\r\x1b[K"
"""Moves the cursor to the start of its line, and clears the line."""


def bar(fraction: float, text: str) -> str:
    """A bar of `fraction`, 0 to 1, with its percentage and a text without control characters."""
    fraction = min(1.0, max(0.0, fraction))
    full = round(fraction * NUM_CELLS)
    shown = "".join(character for character in text if character.isprintable())
    return f"  [{'#' * full}{'.' * (NUM_CELLS - full)}] {fraction:4.0%} {shown}"


class BarHandler(logging.StreamHandler[TextIO]):
    """Writes records as lines, except those with the field `fraction`: each of them replaces the bar."""

    _has_bar = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        fraction = getattr(record, "fields", {}).get("fraction")
        if isinstance(fraction, int | float):
            # A line that wraps could not be cleared.
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(START_OF_LINE + bar(fraction, record.getMessage())[:width])
            self.flush()
            self._has_bar = True
            return
        if self._has_bar:
            self.stream.write(START_OF_LINE)
            self._has_bar = False
        super().emit(record)
