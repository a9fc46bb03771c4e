"""When a source that failed may be tried again."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from millrace_router.adapters.names.recent import Recent

MAX_REMEMBERED = 4096
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
FORGOTTEN_AFTER = 2.0
"""Waits after which a failure counts as the first one again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a source failed, and for how long it is not tried again."""

    reason: str
    seconds: float
    until: float


class BackOff:
    """The failures of sources: each failure doubles the wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: Recent[Hashable, Failure] = Recent(MAX_REMEMBERED, clock=clock)

    def rest(self, source: Hashable) -> tuple[str, float] | None:
        """Why the source failed, and the seconds until it may be tried again; None: now."""
        found = self._failures.get(source)
        if found is None or found.until <= self._clock():
            return None
        return found.reason, found.until - self._clock()

    def fail(self, source: Hashable, reason: str, at_least: float | None) -> float:
        """Remember a failure, and return the seconds until the source may be tried again."""
        found = self._failures.get(source)
        now, seconds = self._clock(), FIRST_SECONDS
        if found is not None and now < found.until + FORGOTTEN_AFTER * found.seconds:
            seconds = min(2 * found.seconds, LONGEST_SECONDS)
        if at_least is not None and math.isfinite(at_least):
            seconds = max(seconds, min(at_least, LONGEST_SECONDS))
        self._failures.put(source, Failure(reason, seconds, now + seconds))
        return seconds

    def succeed(self, source: Hashable) -> None:
        """Forget the source's failures."""
        self._failures.drop(source)
