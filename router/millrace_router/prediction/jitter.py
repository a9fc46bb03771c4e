"""How steps of one load differ in duration."""

from __future__ import annotations

from collections import deque

NUM_RATIOS = 256


class StepJitter:
    """The ratios of the last `NUM_RATIOS` steps to the durations that the cost model expected."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)

    def add(self, ratio: float) -> None:
        """Count a step that took `ratio` times as long as expected."""
        self._ratios.append(ratio)

    def ratios(self) -> list[float]:
        """The ratios in their order, scaled to a mean of 1; empty before there are `NUM_RATIOS`.

        The order matters: a delay on a shared machine lasts for several steps.
        """
        if len(self._ratios) < NUM_RATIOS:
            return []
        mean = sum(self._ratios) / NUM_RATIOS
        return [ratio / mean for ratio in self._ratios]
