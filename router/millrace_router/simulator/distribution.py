"""Percentiles of millions of durations in little memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

STEPS_PER_E = 100
"""Buckets in which values grow by a factor of e: each is 1 % wide."""


class Distribution:
    """Counts of values of 0 or more by logarithmic buckets; a bucket answers with the mean of what it holds.

    So a percentile is at most 1 % from the exact one, and exact where all values of its bucket are equal.
    """

    def __init__(self) -> None:
        self.buckets: dict[int, list[float]] = {}
        """Count and sum by floor(100 ln value)."""

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        key = math.floor(math.log(value) * STEPS_PER_E) if value > 0.0 else -(10**9)
        bucket = self.buckets.get(key)
        if bucket is None:
            self.buckets[key] = [times, value * times]
        else:
            bucket[0] += times
            bucket[1] += value * times

    def merge(self, others: Iterable[Distribution]) -> None:
        """Count what the others hold too."""
        for other in others:
            for key, (times, total) in other.buckets.items():
                bucket = self.buckets.setdefault(key, [0, 0.0])
                bucket[0] += times
                bucket[1] += total

    @property
    def count(self) -> int:
        """How many values there are."""
        return int(sum(times for times, _ in self.buckets.values()))

    @property
    def mean(self) -> float:
        """Their mean; 0 where there are none."""
        return sum(total for _, total in self.buckets.values()) / max(1, self.count)

    def percentile(self, percent: float) -> float:
        """The smallest value that `percent` of the values do not exceed (nearest rank); 0 where there are none."""
        rank = math.ceil(self.count * percent / 100)
        for key in sorted(self.buckets):
            times, total = self.buckets[key]
            rank -= int(times)
            if rank <= 0:
                return total / times
        return 0.0
