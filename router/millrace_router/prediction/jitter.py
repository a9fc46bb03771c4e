"""What a cost model leaves out: how steps of one load differ, and what the router takes for requests and answers."""

from __future__ import annotations

from collections import deque
from statistics import median

NUM_RATIOS = 256
_NUM_ENTRIES = 65
_TURN_RATE = 1 / 64
"""How far one answer moves what is known of them."""


class StepJitter:
    """Of the last steps."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)
        self._turn_seconds = 0.0
        self._entries: deque[float] = deque(maxlen=_NUM_ENTRIES)

    @property
    def entry_seconds(self) -> float:
        """From the arrival of a request until it is queued: the median of the last ones; 0 before the first."""
        return median(self._entries) if self._entries else 0.0

    @property
    def turn_seconds(self) -> float:
        """From an answer until its tokens are handed out and the step after the next one is planned."""
        return self._turn_seconds

    def took(self, ratio: float) -> None:
        """Learn from a step that took `ratio` times as long as others of its load."""
        self._ratios.append(ratio)

    def entered(self, seconds: float) -> None:
        """Learn from a request that was queued so long after its arrival."""
        self._entries.append(seconds)

    def turned(self, seconds: float) -> None:
        """Learn from an answer that the router was at for so long."""
        self._turn_seconds += _TURN_RATE * (seconds - self._turn_seconds)

    def ratios(self) -> list[float]:
        """Of the last `NUM_RATIOS` steps, in their order and scaled to a mean of 1: costs tell the mean.

        Empty before as many. Neighbours belong together: what slows one step of a shared machine slows the next ones.
        """
        if len(self._ratios) < NUM_RATIOS:
            return []
        mean = sum(self._ratios) / NUM_RATIOS
        return [ratio / mean for ratio in self._ratios]
