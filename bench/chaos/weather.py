"""When what was going on: which breaks of a connection a fault excuses, and how long no token came."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Trouble(Enum):
    """What the contract lets clients see of a fault."""

    RESETS = "the router is gone: connections break, and are refused until it is back"
    REFUSALS = "more requests than permits: some are answered 429"


@dataclass(slots=True)
class _Spell:
    trouble: Trouble
    start: float
    end: float | None = None


class Weather:
    """The spells of trouble of a campaign, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._spells: list[_Spell] = []

    def begin(self, trouble: Trouble, now: float) -> None:
        """A spell begins; one of the same trouble that goes on, goes on."""
        if not any(spell.trouble is trouble and spell.end is None for spell in self._spells):
            self._spells.append(_Spell(trouble, now))

    def end(self, trouble: Trouble, now: float) -> None:
        """The spell that goes on is over."""
        for spell in self._spells:
            if spell.trouble is trouble and spell.end is None:
                spell.end = now

    def excuses(self, trouble: Trouble, start: float, end: float) -> bool:
        """Whether there was such trouble at any moment from `start` to `end`."""
        return any(
            spell.trouble is trouble and spell.start <= end and (spell.end or end) >= start
            for spell in self._spells
        )


class Pulse:
    """The longest silence over all streams together, since it was last started."""

    def __init__(self) -> None:
        self._last = 0.0
        self._longest = 0.0
        self.num_beats = 0

    def start(self, now: float) -> None:
        """Forget what was before."""
        self._last, self._longest, self.num_beats = now, 0.0, 0

    def beat(self, now: float) -> None:
        """A token has come."""
        self._longest = max(self._longest, now - self._last)
        self._last = now
        self.num_beats += 1

    @property
    def longest(self) -> float:
        """Seconds; the silence that has not ended yet does not count."""
        return self._longest
