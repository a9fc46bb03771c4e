"""Counts and distributions of a simulated server."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.schedulable import SchedulableRequest


class InterTokenLatencies:
    """Inter-token latencies of all streams, from the number of streams by the time of their last token.

    Nearly always all streams had their last token in the same step, so a step costs the same for 1 and for 1000
    streams. The result is exact unless some streams miss a step for lack of blocks: then the streams with the latest
    last token are assumed to go on first.
    """

    def __init__(self, seconds: Distribution) -> None:
        self._seconds = seconds
        self._streams: list[tuple[float, int]] = []
        """(time of the last token, number of streams), the latest last."""

    def step(self, now: float, *, decoded: int, joined: int, ended: int) -> None:
        """Count a step that was answered `now`.

        `decoded` streams got another token and `joined` streams their first since admission; for `ended` of all these
        it was the last.
        """
        streams, num_left = self._streams, decoded
        while num_left and streams:
            last, count = streams.pop()
            taken = min(count, num_left)
            self._seconds.add(now - last, taken)
            if taken < count:
                streams.append((last, count - taken))
            num_left -= taken
        if decoded + joined > ended:
            streams.append((now, decoded + joined - ended))

    def leave(self, last: float) -> None:
        """Remove a preempted stream, whose last token came at the time `last`."""
        streams = self._streams
        for place in reversed(range(len(streams))):
            time, count = streams[place]
            if time <= last or place == 0:
                streams[place] = time, count - 1
                if count == 1:
                    del streams[place]
                return


STEPS_PER_E = 100
"""Buckets per factor of e; each is 1 % wide."""


class Distribution:
    """Counts of values of 0 or more in logarithmic buckets; a percentile is the mean of its bucket.

    It is at most 1 % from the exact percentile, and exact if all values of the bucket are equal.
    """

    def __init__(self) -> None:
        self.buckets: dict[int, list[float]] = {}
        """Count and sum by floor(100 ln value)."""

    def add(self, value: float, times: int = 1) -> None:
        key = math.floor(math.log(value) * STEPS_PER_E) if value > 0.0 else -(10**9)
        bucket = self.buckets.get(key)
        if bucket is None:
            self.buckets[key] = [times, value * times]
        else:
            bucket[0] += times
            bucket[1] += value * times

    @property
    def count(self) -> int:
        return int(sum(times for times, _ in self.buckets.values()))

    @property
    def mean(self) -> float:
        """The mean; 0 without values."""
        return sum(total for _, total in self.buckets.values()) / max(1, self.count)

    def percentile(self, percent: float) -> float:
        """The smallest value that `percent` of the values do not exceed (nearest rank); 0 without values."""
        rank = math.ceil(self.count * percent / 100)
        for key in sorted(self.buckets):
            times, total = self.buckets[key]
            rank -= int(times)
            if rank <= 0:
                return total / times
        return 0.0


@dataclass(slots=True)
class SimulationMetrics:
    """Counts and durations (in seconds) of one replica, or of as many as it stands for."""

    replicas: int = 0
    offered: int = 0
    finished: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Requests without an answer, by reason."""
    preemptions: int = 0
    adapter_loads: int = 0
    cached_tokens: int = 0
    """Input tokens found in the prefix cache."""
    prefill_tokens: int = 0
    """Input tokens computed, those computed again after a preemption included."""
    output_tokens: int = 0
    steps: int = 0
    started_at: float = math.inf
    """First arrival."""
    ended_at: float = 0.0
    """Last answer."""
    busy_seconds: float = 0.0
    """Sum of the durations of steps."""
    row_seconds: float = 0.0
    """Sum over steps of duration times rows computed."""
    kv_seconds: float = 0.0
    """Sum over steps of duration times the share of KV blocks that sequences hold."""
    kv_max: float = 0.0
    """Largest such share."""
    queue: Distribution = field(default_factory=Distribution)
    """From arrival to admission."""
    first_token: Distribution = field(default_factory=Distribution)
    """From arrival to the first token."""
    first_token_of: dict[str, Distribution] = field(default_factory=dict)
    """The same for each tenant that has a name."""
    between_tokens: Distribution = field(default_factory=Distribution)
    latency: Distribution = field(default_factory=Distribution)
    """From arrival to the last token."""

    def began(self, request: SchedulableRequest, seconds: float) -> None:
        """Count the first token of `request`, which came after `seconds`."""
        self.first_token.add(seconds)
        if request.tenant:
            self.first_token_of.setdefault(request.tenant, Distribution()).add(seconds)

    def took(self, seconds: float, load: StepLoad, kv_use: float) -> None:
        """Count a step of `seconds`; sequences held the share `kv_use` of the KV blocks."""
        self.steps += 1
        self.prefill_tokens += load.prefill_tokens
        self.busy_seconds += seconds
        self.row_seconds += seconds * (load.decodes + load.num_chunks)
        self.kv_seconds += seconds * kv_use
        self.kv_max = max(self.kv_max, kv_use)

    def scale(self, factor: float) -> None:
        """Multiply all counts and sums by `factor`."""
        for name in _COUNTS:
            setattr(self, name, round(getattr(self, name) * factor))
        self.rejected = Counter({k: round(n * factor) for k, n in self.rejected.items()})
        for name in ("busy_seconds", "row_seconds", "kv_seconds"):
            setattr(self, name, getattr(self, name) * factor)


_COUNTS = (
    "replicas",
    "offered",
    "finished",
    "preemptions",
    "cached_tokens",
    "prefill_tokens",
    "output_tokens",
    "steps",
)
