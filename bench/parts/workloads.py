"""Lengths and arrival times from a seed, and figures of answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from bench.parts.client import Answer
from millrace.load.measurement import quantile


def poisson_seconds(rate: float, count: int, *, seed: str) -> list[float]:
    """Arrival times of `count` requests at `rate` a second, in seconds."""
    generator, now, moments = random.Random(seed), 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate)
        moments.append(now)
    return moments


def exponential_lengths(count: int, *, mean: float, most: int, seed: str) -> list[int]:
    """Exponential numbers of tokens between 1 and `most`; another `most` cuts the same draws elsewhere."""
    generator = random.Random(seed)
    drawn = (generator.expovariate(1 / mean) for _ in range(count))
    return [min(most, max(1, round(length))) for length in drawn]


def gaps_within(arrivals: Sequence[float], begin: float, end: float) -> Iterator[float]:
    """Seconds between consecutive tokens of one stream, for gaps that overlap `begin` to `end`."""
    for before, after in pairwise(arrivals):
        if after > begin and before < end:
            yield after - before


def milliseconds(seconds: Sequence[float], *shares: float) -> tuple[float, ...]:
    """Quantiles of durations."""
    ordered = sorted(seconds)
    return tuple(1000 * quantile(ordered, share) for share in shares)


def saturated_rate(answers: Sequence[Answer]) -> float:
    """Requests a second of a saturated server: over the middle half of a burst's answers."""
    ends = sorted(answer.ended for answer in answers)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])
