"""A clock that stands still until a test sets it."""

from __future__ import annotations


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
