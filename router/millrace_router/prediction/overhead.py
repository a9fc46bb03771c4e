"""The router's own time for a request and for an answer."""

from __future__ import annotations

from collections import deque
from statistics import median

_NUM_ENTRIES = 65
_ANSWER_RATE = 1 / 64
"""Weight of one answer in the mean."""


class RouterOverhead:
    """Seconds that the router adds to a request and to a step."""

    def __init__(self) -> None:
        self._turn_seconds = 0.0
        self._entries: deque[float] = deque(maxlen=_NUM_ENTRIES)

    @property
    def entry_seconds(self) -> float:
        """From the arrival of a request until it is queued: the median of the last ones; 0 before the first."""
        return median(self._entries) if self._entries else 0.0

    @property
    def turn_seconds(self) -> float:
        """From an answer until its tokens are delivered and the step after the next one is planned: the mean."""
        return self._turn_seconds

    def add_entry(self, seconds: float) -> None:
        """Count a request that was queued so long after its arrival."""
        self._entries.append(seconds)

    def add_answer(self, seconds: float) -> None:
        """Count an answer that took the router so long."""
        self._turn_seconds += _ANSWER_RATE * (seconds - self._turn_seconds)
