"""The steps in flight of a simulated server: when each one is planned, begins and is answered."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import cycle

from millrace.simulate.deployment import Deployment
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.prediction.step_load import StepLoad
from millrace_router.scheduler.step_plan import Row, StepPlan


@dataclass(slots=True)
class Flight:
    """A step that is not answered yet, and the content of its answer."""

    number: int
    plan: StepPlan
    began_at: float
    predicted: float
    """Seconds that the cost model predicts."""
    seconds: float
    """Seconds that it takes."""
    answered_at: float
    started: list[Row] = field(default_factory=list)
    """Rows whose input it completes; it yields their first token since admission."""
    ended: list[Row] = field(default_factory=list)
    """Rows whose last token it yields."""
    preempted: list[Row] = field(default_factory=list)
    """Rows that were preempted after it; no later step names them."""
    num_discarded: int = 0
    """Tokens of rows that ended before its answer."""

    def sort_ended(self) -> None:
        """Put ended rows in the order of the answer: the order of releases decides which blocks are evicted first."""
        if len(self.ended) > 1:
            decodes = self.plan.decodes
            begun = [row for row in self.started if row in self.ended]
            others = [row for row in self.ended if row not in begun]
            self.ended = begun + sorted(others, key=lambda row: decodes.index(row.slot))


class Pipeline:
    """The steps in flight. A step takes the predicted time, times the next of the deployment's ratios, which repeat.

    Its tokens are delivered, and the next step is planned, `turn_seconds` after its end. Step n + 1 begins when step n
    ends, or when it is sent if that is later.
    """

    def __init__(self, deployment: Deployment, cost: CostModel, late: LatePlanning) -> None:
        self.flights: deque[Flight] = deque()
        self.last_sent = 0
        self._cost = cost
        self._late = late
        self._depth = deployment.steps_in_flight
        self._turn_seconds = deployment.turn_seconds
        self._ratios = cycle(deployment.step_ratios or (1.0,))
        self._open_until: float | None = None
        """When the step after the one in flight will be planned; None if it is not delayed."""
        self._shards_free_at = 0.0

    @property
    def last_answered(self) -> int:
        """Number of the last step that was answered."""
        return self.last_sent - len(self.flights)

    @property
    def next_event(self) -> float:
        """When a step is planned or answered next; infinity while no step is in flight."""
        if self._open_until is not None:
            return self._open_until
        return self.flights[0].answered_at if self.flights else math.inf

    def began_at(self, now: float) -> float:
        """When the oldest step in flight began; `now` if there is none."""
        return self.flights[0].began_at if self.flights else now

    def take_event(self) -> Flight | None:
        """Take the step that is answered at `next_event`; None if a step is planned then instead."""
        if self._open_until is not None or not self.flights:
            return None
        return self.flights.popleft()

    def wants_step(self, now: float) -> bool:
        """Whether to plan another step now, instead of later while the one in flight runs."""
        self._open_until = None
        if not self.flights:
            return True
        if len(self.flights) >= self._depth:
            return False
        flight = self.flights[0]
        open_until = flight.began_at + self._late.open_part(flight.predicted)
        if open_until <= now:
            return True
        # The answer may come earlier.
        if open_until < flight.answered_at:
            self._open_until = open_until
        return False

    def send(self, plan: StepPlan, load: StepLoad, now: float) -> Flight:
        """Let the shards compute `plan`, which has this `load`, after the steps in flight."""
        self.last_sent += 1
        computes = plan.has_forward or plan.encodes
        predicted = (self._cost.seconds(load) or 0.0) if computes else 0.0
        seconds = predicted * next(self._ratios)
        began_at = max(now, self._shards_free_at)
        self._shards_free_at = began_at + seconds
        answered_at = self._shards_free_at + self._turn_seconds
        flight = Flight(self.last_sent, plan, began_at, predicted, seconds, answered_at)
        self.flights.append(flight)
        return flight
