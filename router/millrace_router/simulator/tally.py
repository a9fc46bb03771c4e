"""What is counted while a replica runs; replicas add up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from millrace_router.simulator.distribution import Distribution
from millrace_router.step_load import StepLoad


@dataclass(slots=True)
class Tally:
    """Counts and durations (in seconds) of one replica, or of several together."""

    replicas: int = 0
    offered: int = 0
    finished: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Requests without an answer, by reason."""
    preemptions: int = 0
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
    """Sum over steps of their durations."""
    row_seconds: float = 0.0
    """Sum over steps of duration times rows computed."""
    kv_seconds: float = 0.0
    """Sum over steps of duration times share of KV blocks that sequences hold."""
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

    def took(self, seconds: float, load: StepLoad, kv_use: float) -> None:
        """Count a step of `seconds` in which sequences held so large a share of the KV blocks."""
        self.steps += 1
        self.prefill_tokens += load.prefill_tokens
        self.busy_seconds += seconds
        self.row_seconds += seconds * (load.decodes + load.num_chunks)
        self.kv_seconds += seconds * kv_use
        self.kv_max = max(self.kv_max, kv_use)

    def scale(self, factor: float) -> None:
        """Count `factor` times as many replicas that do the same."""
        for name in _COUNTS:
            setattr(self, name, round(getattr(self, name) * factor))
        self.rejected = Counter({k: round(n * factor) for k, n in self.rejected.items()})
        for name in ("busy_seconds", "row_seconds", "kv_seconds"):
            setattr(self, name, getattr(self, name) * factor)


def total(tallies: Sequence[Tally]) -> Tally:
    """Several replicas as one."""
    result = Tally()
    for tally in tallies:
        for item in fields(Tally):
            mine, other = getattr(result, item.name), getattr(tally, item.name)
            if isinstance(mine, Distribution):
                mine.merge([other])
            elif isinstance(mine, Counter):
                mine.update(other)
            elif isinstance(mine, dict):
                for tenant, distribution in other.items():
                    mine.setdefault(tenant, Distribution()).merge([distribution])
            elif item.name not in _EXTREMES:
                setattr(result, item.name, mine + other)
    if tallies:
        for name, choose in _EXTREMES.items():
            setattr(result, name, choose(getattr(tally, name) for tally in tallies))
    return result


_EXTREMES = {"started_at": min, "ended_at": max, "kv_max": max}
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
