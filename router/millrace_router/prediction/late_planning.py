"""How long the next step stays undecided while the shards are at another one."""

from __future__ import annotations

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.step_load import StepLoad

LEAD_SECONDS = 0.005
"""What it takes at most from a plan to shards that are ready to begin it."""
MOST = 0.9
"""Of a predicted step."""
_GIVE_WAY = 7 / 8
_RECOVER = 1 / 64
"""One step in twenty may come late where steps vary; where they do not, none does."""


class LatePlanning:
    """Plans step n + 1 as late in step n as the shards still do not wait for it.

    Whoever arrives until then joins the next step. Planned as soon as step n begins, it would be the one after: with
    two steps in flight a request would wait for one and a half steps in the mean and two at most, instead of for
    little more than the half and one.

    How late is late enough is learned: a share of the predicted step, which falls by an eighth whenever the shards
    were done before or just after, and otherwise creeps back to `most` (additive increase, multiplicative decrease).
    """

    def __init__(self, cost: CostModel, *, most: float = MOST) -> None:
        """With `most` = 0 nothing stays undecided."""
        self._cost = cost
        self._most = most
        self._share = most

    @property
    def share(self) -> float:
        """Of a predicted step, what the next one stays undecided for by what has been learned."""
        return self._share

    def open_seconds(self, load: StepLoad) -> float:
        """From the start of a step of this load until the next one is to be planned; 0 while nothing is known.

        Extra positions do not count: rows with a grammar may fill many and hardly ever do, and of a step that is
        shorter than predicted the next one comes too late.
        """
        seconds = self._cost.seconds(load.with_extra(0))
        return 0.0 if seconds is None else self.open_part(seconds)

    def open_part(self, seconds: float) -> float:
        """The same for a step that takes so many seconds."""
        return max(0.0, min(self._share * seconds, seconds - LEAD_SECONDS))

    def learn(self, spare_seconds: float, *, was_open: bool = True) -> None:
        """Take note that a step went on for so long after the next one was sent; 0 if it ended before.

        A step that was not left open could not have been sent earlier: of that, only time to spare says anything.
        """
        if spare_seconds >= LEAD_SECONDS / 2:
            self._share += _RECOVER * (self._most - self._share)
        elif was_open:
            self._share *= _GIVE_WAY
