"""The errors that clients may see during a fault."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AllowedError(Enum):
    """An error that the contract allows while a fault lasts."""

    RESETS = "the router is down: its connections break, and new ones wait until it is back"
    FORGETS = "the router is replaced: the next one does not know adapters that were loaded later"
    REFUSALS = "more requests than permits: some are answered 429"
    FETCHES = "fetching processes are killed: requests for their adapters are answered 503"


@dataclass(slots=True)
class _Period:
    error: AllowedError
    start: float
    end: float | None = None


class AllowedErrors:
    """The periods of a campaign in which each error is allowed, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._periods: list[_Period] = []

    def begin(self, error: AllowedError, now: float) -> None:
        """Allow the error from now on."""
        if not any(period.error is error and period.end is None for period in self._periods):
            self._periods.append(_Period(error, now))

    def end(self, error: AllowedError, now: float) -> None:
        """Stop allowing the error."""
        for period in self._periods:
            if period.error is error and period.end is None:
                period.end = now

    def allow(self, error: AllowedError, start: float, end: float) -> bool:
        """Whether the error was allowed at any moment from `start` to `end`."""
        return any(
            period.error is error and period.start <= end and (period.end or end) >= start
            for period in self._periods
        )
