"""Tells a step that hangs from one that is slow."""

from __future__ import annotations

from millrace_router.cost import CostModel
from millrace_router.step_load import StepLoad

SLOWEST = 30.0
"""How many times longer than predicted a step may take: a busy neighbour made steps on a CPU 12 to 29 times slower."""
TICK_SECONDS = 0.5


class Watchdog:
    """Adds up the time that the oldest step has been running, tick by tick.

    Its own ticks and not the clock, because a router that was stopped for a while must not take that for the shards'
    doing: a tick counts as two at most.
    """

    def __init__(self, floor_seconds: float, cost: CostModel) -> None:
        self._floor_seconds = floor_seconds
        self._cost = cost
        self._step: object = None
        self._seconds = 0.0

    @property
    def tick_seconds(self) -> float:
        """How often to look."""
        return min(TICK_SECONDS, self._floor_seconds / 4)

    def limit_seconds(self, load: StepLoad) -> float:
        """How long a step of this size may take."""
        predicted = self._cost.seconds(load)
        return max(self._floor_seconds, SLOWEST * (predicted or 0.0))

    def is_hung(self, step: object, load: StepLoad, seconds: float) -> bool:
        """Whether `step`, the oldest in flight, has been running for too long, `seconds` after the last look."""
        if step is not self._step:
            self._step, self._seconds = step, 0.0
            return False
        self._seconds += min(seconds, 2 * self.tick_seconds)
        return self._seconds > self.limit_seconds(load)
