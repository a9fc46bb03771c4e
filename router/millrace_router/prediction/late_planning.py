"""How long to delay planning step n + 1 while step n runs."""

from __future__ import annotations

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.step_load import StepLoad

LEAD_SECONDS = 0.005
"""Most seconds from a plan until the shards can begin the step."""
MOST = 0.9
"""Largest delay, as a share of the predicted step."""
_DECREASE = 7 / 8
"""Factor on the share after a step that was planned too late."""
_INCREASE = 1 / 64
"""Part of the way back to `MOST` per step. With these two, one step in twenty is late where durations vary."""


class LatePlanning:
    """Plans step n + 1 as late in step n as possible without a wait of the shards.

    A request that arrives before the plan joins step n + 1. If that were planned when step n begins, the request would
    join the step after it: with two steps in flight it would wait for 1.5 steps in the mean and 2 at most, instead of
    little more than 0.5 and 1.

    The delay is a share of the predicted step. It falls by an eighth whenever step n ended before the plan or just
    after it, and otherwise returns slowly to `most` (additive increase, multiplicative decrease).
    """

    def __init__(self, cost: CostModel, *, most: float = MOST) -> None:
        """With `most` = 0 each step is planned at once."""
        self._cost = cost
        self._most = most
        self._share = most

    @property
    def share(self) -> float:
        """The learned delay, as a share of the predicted step."""
        return self._share

    def open_seconds(self, load: StepLoad) -> float:
        """Seconds from the start of a step of this load until the next plan; 0 before the cost model's first fit.

        Extra positions do not count: rows with a grammar may fill many and hardly ever do, and after a step that is
        shorter than predicted the next one would be late.
        """
        seconds = self._cost.seconds(load.with_extra(0))
        return 0.0 if seconds is None else self.open_part(seconds)

    def open_part(self, seconds: float) -> float:
        """Return seconds from the start of a step of this duration until the next plan."""
        return max(0.0, min(self._share * seconds, seconds - LEAD_SECONDS))

    def learn(self, spare_seconds: float, *, was_open: bool = True) -> None:
        """Learn that a step ran on for `spare_seconds` after the next one was sent; 0 if it ended before.

        `was_open` is whether the next step was planned late. If it was not, it could not have been sent earlier, and
        only a step with time to spare counts.
        """
        if spare_seconds >= LEAD_SECONDS / 2:
            self._share += _INCREASE * (self._most - self._share)
        elif was_open:
            self._share *= _DECREASE
