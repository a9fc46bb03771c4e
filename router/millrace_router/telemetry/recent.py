"""Rates and percentiles of the last minute, from readings of the metrics that are taken when somebody asks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from millrace_router.telemetry.metrics import Metrics

WINDOW_SECONDS = 60.0
SHORTEST_SECONDS = 1.0
"""Rates over less mean little."""
MAX_READINGS = 64
"""Readings are at least a second apart, so these cover more than the window."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts since the start of the process."""

    at: float
    """By the clock of `Recent`, in seconds."""
    tokens: int
    """Generated tokens."""
    prompt_tokens: float
    """Prompt tokens, computed or found in the prefix cache."""
    cached_tokens: float
    """Of these, the ones found in the prefix cache."""
    first_tokens: tuple[int, ...]
    """Requests by the bucket of their time to the first token."""


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two readings."""

    begin: Reading
    end: Reading
    bounds: Sequence[float]
    """Upper bounds of the buckets of `Reading.first_tokens`, in seconds; the last bucket has none."""

    @property
    def seconds(self) -> float:
        return self.end.at - self.begin.at

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second."""
        return (self.end.tokens - self.begin.tokens) / self.seconds if self.seconds else 0.0

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt tokens that the prefix cache had, 0 to 1; None without prompts."""
        prompt_tokens = self.end.prompt_tokens - self.begin.prompt_tokens
        cached_tokens = self.end.cached_tokens - self.begin.cached_tokens
        return cached_tokens / prompt_tokens if prompt_tokens else None

    def first_token_seconds(self, share: float) -> float | None:
        """Return the time to the first token that this share of the requests did not exceed; None without requests."""
        pairs = zip(self.begin.first_tokens, self.end.first_tokens, strict=True)
        return quantile(self.bounds, [end - begin for begin, end in pairs], share)


class Recent:
    """Readings of the last minute; it costs nothing while it is not read."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._readings = deque([self._read()], maxlen=MAX_READINGS)
        self._started_at = self._readings[0].at

    @property
    def uptime_seconds(self) -> float:
        return self._clock() - self._started_at

    def window(self) -> Window:
        """Take a reading, and return the time since the oldest one of the last minute.

        If none is that young, which is so for the first who asks after a while, the window is longer.
        """
        now, readings = self._read(), tuple(self._readings)
        old = [one for one in readings if now.at - one.at >= SHORTEST_SECONDS]
        young = [one for one in old if now.at - one.at <= WINDOW_SECONDS]
        begin = young[0] if young else (old[-1] if old else readings[0])
        if now.at - readings[-1].at >= SHORTEST_SECONDS:
            self._readings.append(now)
        return Window(begin, now, self._metrics.time_to_first_token_seconds.bounds)

    def _read(self) -> Reading:
        metrics = self._metrics
        first_tokens = tuple(metrics.time_to_first_token_seconds.counts)
        cached_tokens = metrics.prefix_cache_hit_tokens.value
        return Reading(
            at=self._clock(),
            tokens=sum(first_tokens) + sum(metrics.inter_token_latency_seconds.counts),
            prompt_tokens=metrics.prefill_tokens.value + cached_tokens,
            cached_tokens=cached_tokens,
            first_tokens=first_tokens,
        )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimate the value that a `share` of the observations did not exceed; None without observations.

    `counts` has the observations up to each bound, and those beyond the last one. As in Prometheus, observations are
    taken to be even within a bucket, and those beyond the last bound count as that bound.
    """
    rank = share * sum(counts)
    if not any(counts):
        return None
    for index, cumulative in enumerate(accumulate(counts)):
        if cumulative >= rank and counts[index]:
            break
    if index == len(bounds):
        return bounds[-1]
    below = bounds[index - 1] if index else 0.0
    part = (rank - (cumulative - counts[index])) / counts[index]
    return below + (bounds[index] - below) * part
