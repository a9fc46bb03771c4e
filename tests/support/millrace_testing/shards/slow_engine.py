"""A simulated replica that delivers every token of every step on its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.simulate.deployment import Deployment
from millrace.simulate.simulated_request import Arrival
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LEAD_SECONDS, MOST
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.step_plan import Row, StepPlan


@dataclass(eq=False, kw_only=True)
class SlowRequest(SchedulableRequest):
    """A request with the times of its tokens."""

    arrival: Arrival
    block_size: int
    admitted_at: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.num_generated >= min(self.arrival.output_tokens, self.max_new_tokens)

    def block_keys(self, count: int) -> Sequence[bytes]:
        shared = self.arrival.prefix_tokens // self.block_size
        owners = [
            f"group {self.arrival.group}" if index < shared else f"request {self.request_id}"
            for index in range(count)
        ]
        return [f"{owner}, block {index}".encode() for index, owner in enumerate(owners)]


def request_of(row: Row) -> SlowRequest:
    assert isinstance(row.entry, SlowRequest)
    return row.entry


@dataclass(frozen=True)
class SlowFlight:
    """A step in flight."""

    plan: StepPlan
    completed: list[int]
    """Slots whose prompt the step completes."""
    began_at: float
    ends_at: float

    @property
    def open_until(self) -> float:
        """The time of the next plan, with late planning."""
        seconds = self.ends_at - self.began_at
        return self.began_at + max(0.0, min(MOST * seconds, seconds - LEAD_SECONDS))


class SlowEngine:
    """Serves and records all arrivals of a list."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.requests: list[SlowRequest] = []
        self.plans: list[StepPlan] = []
        self.busy_seconds = 0.0
        self.cost = CostModel.fixed(deployment.cost_model)
        self.planner: Planner = deployment.new_planner(self.cost)
        self.waiting: Any = deployment.new_queue()
        self.flights: deque[SlowFlight] = deque()
        self.shards_free_at = 0.0
        self.num_answered = 0

    def run(self, arrivals: Sequence[Arrival]) -> None:
        coming, now = deque(arrivals), 0.0
        while True:
            self._arrive_until(coming, now)
            self._plan(now, most=1 if self.is_late else self.deployment.steps_in_flight)
            if len(self.flights) == 1 and self.is_late:
                now = self.flights[0].open_until
                self._arrive_until(coming, now)
                self._plan(now, most=2)
            if self.flights:
                flight = self.flights.popleft()
                now = flight.ends_at
                self._deliver(flight)
            elif coming:
                now = coming[0].arrived_at
            else:
                return

    @property
    def is_late(self) -> bool:
        """Whether the second of two steps is planned late."""
        return self.deployment.late_planning == "on" and self.deployment.steps_in_flight == 2

    def _arrive_until(self, coming: deque[Arrival], now: float) -> None:
        while coming and coming[0].arrived_at <= now:
            self._arrive(coming.popleft())

    def _arrive(self, arrival: Arrival) -> None:
        room = self.deployment.max_total_tokens - arrival.prompt_tokens
        limit = min(room, arrival.max_new_tokens or room)
        size = self.deployment.block_size
        request = SlowRequest(
            request_id=len(self.requests),
            num_prompt_tokens=arrival.prompt_tokens,
            max_new_tokens=limit,
            queued_at=arrival.arrived_at,
            arrival=arrival,
            block_size=size,
        )
        self.requests.append(request)
        self.waiting.append(request)

    def _plan(self, now: float, *, most: int) -> None:
        while len(self.flights) < most:
            plan = self.planner.plan(
                self.waiting, last_sent=len(self.plans), last_answered=self.num_answered
            )
            if plan is None:
                return
            for row in plan.admitted:
                request = request_of(row)
                if request.admitted_at is None:
                    request.admitted_at = now
            seconds = (self.cost.seconds(plan.load) or math.nan) if plan.has_forward else 0.0
            self.busy_seconds += seconds
            began_at = max(now, self.shards_free_at)
            self.shards_free_at = began_at + seconds
            self.plans.append(plan)
            rows = self.planner.rows
            completed = [slot for slot, _ in plan.chunks if not rows[slot].num_prompt_left]
            self.flights.append(SlowFlight(plan, completed, began_at, self.shards_free_at))

    def _deliver(self, flight: SlowFlight) -> None:
        self.num_answered += 1
        self.planner.computed(flight.plan)
        for slot in [*flight.completed, *flight.plan.decodes]:
            row = self.planner.row(slot)
            if row is not None:
                request = request_of(row)
                request.token_times.append(flight.ends_at)
                request.num_generated += 1
                if request.has_ended:
                    self.planner.end(row)
        self.planner.answered(self.num_answered)
