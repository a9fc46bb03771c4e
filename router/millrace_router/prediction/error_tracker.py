"""The errors of predictions."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque


class ErrorTracker:
    """Absolute errors, in seconds, of the last `window` predictions of one quantity, in order of size."""

    def __init__(self, window: int = 1000) -> None:
        if window < 1:
            raise ValueError(f"the window must be at least 1: {window=}")
        self._window = window
        self._errors: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._errors)

    def add(self, predicted: float, realised: float) -> None:
        """Count a prediction; the oldest one beyond the window is dropped.

        Raises:
            ValueError: the error is not a number.

        """
        error = abs(predicted - realised)
        if math.isnan(error):
            raise ValueError(f"no error between {predicted} and {realised}")
        if len(self._errors) == self._window:
            del self._sorted[bisect_left(self._sorted, self._errors.popleft())]
        self._errors.append(error)
        insort(self._sorted, error)

    def median(self) -> float:
        """Seconds that half of the errors do not exceed; NaN before the first error."""
        return self._quantile(0.5)

    def p90(self) -> float:
        """Seconds that nine of ten errors do not exceed; NaN before the first error."""
        return self._quantile(0.9)

    def _quantile(self, share: float) -> float:
        if not self._sorted:
            return math.nan
        return self._sorted[max(0, math.ceil(share * len(self._sorted)) - 1)]
