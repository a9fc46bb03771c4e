"""Decides how soon what died is started again, and when to stop trying."""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0


@dataclass(slots=True)
class Breaker:
    """Counts restarts without progress; those of a search for the request that kills shards are counted apart."""

    max_restarts: int
    """How many restarts without progress there may be."""
    restarts: int = 0
    """How many there were since the last progress."""
    searches: int = 0
    """How many more there were that a search had to itself."""
    allowance: int = 0
    """How many of those the search may have."""

    def progressed(self) -> None:
        """What was restarted has done its work: everything is forgiven."""
        self.restarts = self.searches = self.allowance = 0

    def suspect(self, count: int) -> None:
        """A search goes on among `count` requests; bisection takes two restarts for each halving."""
        if count > 0:
            self.allowance = max(self.allowance, 2 * math.ceil(math.log2(count)) + 4)

    def restart(self, *, was_ready: bool = True) -> float | None:
        """One more restart is due: seconds to wait before it, None when there have been enough.

        What was not ready when it died was not killed by a request, so that is no part of a search.
        """
        if was_ready and self.searches < self.allowance:
            self.searches += 1
            return 0.0
        if self.restarts >= self.max_restarts:
            return None
        self.restarts += 1
        return delay_seconds(self.restarts)


def delay_seconds(restarts: int) -> float:
    """The first restart comes at once, each further one after twice as long as the one before it."""
    if restarts <= 1:
        return 0.0
    # Doubling ends long before the exponent is a problem.
    return min(FIRST_DELAY_SECONDS * 2.0 ** min(restarts - 2, 16), LONGEST_DELAY_SECONDS)


def is_steady(ready_at: float | None, now: float, *, enough_seconds: float) -> bool:
    """Whether what has been ready since then, if ever, served so long that it did more than start."""
    return ready_at is not None and now - ready_at >= enough_seconds
