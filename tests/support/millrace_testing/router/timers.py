"""A clock that stands still until a test turns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class FakeTimer:
    """A call that is due."""

    due: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeTimers:
    """Stands in for the event loop's `call_later`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[FakeTimer] = []

    def __call__(self, seconds: float, callback: Callable[[], None]) -> FakeTimer:
        self._timers.append(FakeTimer(self.now + seconds, callback))
        return self._timers[-1]

    @property
    def pending(self) -> int:
        """The number of calls that are not cancelled."""
        return sum(not timer.cancelled for timer in self._timers)

    def turn(self, seconds: float) -> None:
        """Let time go by, and call what is due, in order."""
        self.now += seconds
        while due := [t for t in self._timers if t.due <= self.now or t.cancelled]:
            timer = min(due, key=lambda timer: timer.due)
            self._timers.remove(timer)
            if not timer.cancelled:
                timer.callback()
