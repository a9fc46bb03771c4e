"""The figures of a level, from the arrival times of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from millrace.load.levels import Level


@dataclass(slots=True)
class Timeline:
    """The times of one request, in seconds of one monotonic clock."""

    due: float
    """When it was due; latencies of an open loop start here, even where the client was late."""
    arrivals: list[float] = field(default_factory=list)
    """One for each token, or for each event where an event may hold several."""
    usage: tuple[int, int] | None = None
    """Tokens of prompt and answer as the server counts them, where it reports usage."""

    @property
    def num_tokens(self) -> int:
        return len(self.arrivals) if self.usage is None else self.usage[1]

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.due

    @property
    def total_seconds(self) -> float:
        """Time to the last token."""
        return self.arrivals[-1] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [after - before for before, after in pairwise(self.arrivals)]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """p50, p90 and p99 of a sample, in milliseconds; zero for an empty sample."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Quantiles:
        """Interpolate linearly between the closest ranks."""
        ordered = sorted(seconds)
        return cls(*(1000 * quantile(ordered, share) for share in (0.5, 0.9, 0.99)))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ordered sample lies."""
    if not ordered:
        return 0.0
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The figures of one level on one server."""

    server: str
    level: str
    num_requests: int
    num_tokens: int
    failures: tuple[str, ...]
    wall_seconds: float
    """From the first request's due time to the last token."""
    tokens_per_second: float
    first_token_ms: Quantiles
    between_tokens_ms: Quantiles
    total_ms: Quantiles = Quantiles(0.0, 0.0, 0.0)
    """From the due time to the last token."""
    prompt_tokens: float = 0.0
    """Mean by the server's own count; zero where it does not tell."""
    client_cores: float = 0.0
    """CPU seconds of the load generator per second of wall time."""
    other_cores: float = 0.0
    """The same of all other processes; above 0.1 the figure is disturbed."""

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for the results file."""
        return asdict(self)


def summarise(
    server: str, level: Level, timelines: Sequence[Timeline], *, failures: Sequence[str] = ()
) -> Measurement:
    """Reduce the timelines of the requests that succeeded; ValueError when none did."""
    if not timelines:
        reasons = "; ".join(sorted(set(failures))[:3])
        raise ValueError(f"{server}, level {level.name}: every request failed: {reasons}")
    start = min(timeline.due for timeline in timelines)
    wall_seconds = max(timeline.arrivals[-1] for timeline in timelines) - start
    num_tokens = sum(timeline.num_tokens for timeline in timelines)
    first = [timeline.first_token_seconds for timeline in timelines]
    gaps = [gap for timeline in timelines for gap in timeline.gaps]
    prompts = [timeline.usage[0] for timeline in timelines if timeline.usage is not None]
    return Measurement(
        server=server,
        level=level.name,
        num_requests=len(timelines),
        num_tokens=num_tokens,
        failures=tuple(failures),
        wall_seconds=wall_seconds,
        tokens_per_second=num_tokens / wall_seconds if wall_seconds > 0 else 0.0,
        first_token_ms=Quantiles.of(first),
        between_tokens_ms=Quantiles.of(gaps),
        total_ms=Quantiles.of(timeline.total_seconds for timeline in timelines),
        prompt_tokens=fmean(prompts) if prompts else 0.0,
    )
