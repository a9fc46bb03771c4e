"""What is remembered of sources that failed: broken files by their digest, and when a failed fetch may be repeated."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

MAX_REMEMBERED = 4096
FIRST_BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 60.0
FORGOTTEN_AFTER = 2.0
"""Back-offs after which a failure counts as the first one again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Files that cannot be used."""

    source_digest: str
    reason: str


@dataclass(slots=True)
class _BackOff:
    reason: str
    seconds: float
    until: float


class Failures:
    """Failures by source; the oldest are forgotten, so that made-up names need no memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refusals: OrderedDict[str, Refusal] = OrderedDict()
        self._back_offs: OrderedDict[str, _BackOff] = OrderedDict()

    def refusal(self, source: str) -> Refusal | None:
        """The last refusal of the source's files."""
        return self._refusals.get(source)

    def refuse(self, source: str, refusal: Refusal) -> None:
        """Remember files that cannot be used."""
        _put(self._refusals, source, refusal)

    def waiting(self, source: str) -> tuple[str, float] | None:
        """Why the source failed, and the seconds until it may be tried again; None: now."""
        found = self._back_offs.get(source)
        if found is None or found.until <= self._clock():
            return None
        return found.reason, found.until - self._clock()

    def back_off(self, source: str, reason: str, at_least: float | None) -> float:
        """Remember a failure, and return the seconds until the source may be tried again: twice as many each time."""
        found = self._back_offs.get(source)
        now, seconds = self._clock(), FIRST_BACK_OFF_SECONDS
        if found is not None and now < found.until + FORGOTTEN_AFTER * found.seconds:
            seconds = min(2 * found.seconds, LONGEST_BACK_OFF_SECONDS)
        if at_least is not None and math.isfinite(at_least):
            seconds = max(seconds, min(at_least, LONGEST_BACK_OFF_SECONDS))
        _put(self._back_offs, source, _BackOff(reason, seconds, now + seconds))
        return seconds

    def succeed(self, source: str) -> None:
        """Forget the source's failures."""
        self._refusals.pop(source, None)
        self._back_offs.pop(source, None)


def _put(places: OrderedDict[str, T], source: str, value: T) -> None:
    places[source] = value
    places.move_to_end(source)
    if len(places) > MAX_REMEMBERED:
        places.popitem(last=False)
