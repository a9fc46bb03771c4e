"""Whether the shards serve, and how long requests should wait while they do not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_GRACE_SECONDS = 300.0
NUM_REMEMBERED = 64
"""Past outages that are remembered, for the traces of requests that lived through them."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A time without the shards, by the clock of `ShardStatus`."""

    began_at: float
    ended_at: float
    reason: str


class ShardStatus:
    """The current outage of the shards, if any. The batcher writes it; health checks and grammar admission read it."""

    def __init__(
        self,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An outage of more than `grace_seconds` is overdue: requests fail instead of waiting for its end."""
        self.grace_seconds = grace_seconds
        self.since: float | None = None
        """Start of the outage by `clock`; None while the shards serve."""
        self.reason = ""
        """Reason of the outage, for operators."""
        self.has_given_up = False
        """Whether the launcher has stopped restarting the shards."""
        self.clock = clock
        self._cause = ""
        """The first reason of the outage."""
        self._past: deque[Outage] = deque(maxlen=NUM_REMEMBERED)

    @property
    def outage_seconds(self) -> float:
        """Duration of the outage so far; 0 while the shards serve."""
        return 0.0 if self.since is None else self.clock() - self.since

    @property
    def is_overdue(self) -> bool:
        """Whether requests should fail instead of waiting for the shards."""
        return self.has_given_up or self.outage_seconds > self.grace_seconds

    def begin_outage(self, reason: str) -> None:
        """Record that the shards stopped serving; a failure during an outage changes only the reason."""
        self.reason = reason
        if self.since is None:
            self.since, self._cause = self.clock(), reason

    def end_outage(self) -> float | None:
        """Record that the shards serve; the duration of the outage in seconds, None if there was none."""
        if self.since is None:
            return None
        seconds = self.outage_seconds
        self._past.append(Outage(self.since, self.since + seconds, self._cause))
        self.since, self.reason = None, ""
        return seconds

    def outages_between(self, begin: float, end: float) -> list[Outage]:
        """Return the outages that touch this time, with the parts of them that lie in it."""
        outages = list(self._past)
        if self.since is not None:
            outages.append(Outage(self.since, end, self._cause))
        return [
            Outage(max(begin, one.began_at), min(end, one.ended_at), one.reason)
            for one in outages
            if one.began_at < end and one.ended_at > begin
        ]

    def give_up(self, reason: str) -> None:
        """Record that the shards will not be restarted."""
        self.begin_outage(reason)
        self.has_given_up = True
