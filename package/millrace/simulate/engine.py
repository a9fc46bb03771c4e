"""One server under a virtual clock: the router's queue and planner, driven as the batcher drives them."""

from __future__ import annotations

import math
from itertools import count

from millrace.simulate.adapters import SimulatedAdapters
from millrace.simulate.admission import AdmissionControl
from millrace.simulate.deployment import Deployment
from millrace.simulate.metrics import InterTokenLatencies, SimulationMetrics
from millrace.simulate.pipeline import Flight, Pipeline
from millrace.simulate.simulated_request import (
    Arrival,
    PrefixNames,
    SimulatedRequest,
    request_of,
)
from millrace_router.prediction.cost import CostModel
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.factory import late_planning_from
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.step_plan import Row, StepPlan


class StuckError(Exception):
    """Requests wait, nothing runs, and the planner admits no request: a defect of the scheduler."""


class Engine:
    """Router and shards of one server.

    Steps are planned when the batcher plans them: when a request arrives while no step is in flight, when a step is
    answered, or late in the running step. The router's time for a request delays its tokens and nothing else. The
    length of each answer is known in advance, so a row is read when it begins and where it may end, and not for each
    of its tokens.
    """

    def __init__(self, deployment: Deployment, prefixes: PrefixNames | None = None) -> None:
        self.metrics = SimulationMetrics(replicas=1)
        self.now = 0.0
        self._deployment = deployment
        self._cost = CostModel.fixed(deployment.cost_model)
        self._waiting = deployment.new_queue()
        self._planner = self._new_planner()
        self._late = late_planning_from(
            deployment.flags, self._cost, most=deployment.late_planning_share
        )
        self._pipeline = Pipeline(deployment, self._cost, self._late)
        self._admission = AdmissionControl(
            deployment,
            cost=self._cost,
            planner=self._planner,
            waiting=self._waiting,
            late=self._late,
        )
        self._adapters = SimulatedAdapters(deployment, self._waiting)
        self._prefixes = PrefixNames() if prefixes is None else prefixes
        self._inter_token = InterTokenLatencies(self.metrics.between_tokens)
        self._decoded_at = 0.0
        """When the last step that decoded was answered."""
        self._num_present = 0
        self._request_ids = count()
        self._may_expire = deployment.max_queue_wait is not None
        """Whether a waiting request may expire."""
        self._may_end: dict[int, list[Row]] = {}
        """Rows by the first step that may yield their last token."""

    @property
    def next_event(self) -> float:
        """The time of the next `step`; infinity if there is none."""
        due = max(self.now, self._adapters.next_event)
        if self._pipeline.flights:
            return min(due, self._pipeline.next_event)
        return self.now if self._num_present > self._adapters.num_waiting else due

    def run_until(self, time: float) -> None:
        """Let the clock run up to `time`; events at exactly that time are still to come.

        Raises:
            StuckError: no event can happen any more.

        """
        while self.next_event < time:
            self.step()

    def arrive(self, arrival: Arrival) -> SimulatedRequest | None:
        """Accept a request at its time, which is no earlier than `now`; None if it is refused."""
        self.now = arrival.arrived_at
        self.metrics.offered += 1
        self.metrics.started_at = min(self.metrics.started_at, self.now)
        request = self._deployment.new_request(next(self._request_ids), arrival, self._prefixes)
        reason = self._admission.refusal(
            request,
            num_present=self._num_present,
            pipeline=self._pipeline,
            now=self.now,
            adapters=self._adapters,
        )
        if reason is not None:
            self.metrics.rejected[reason] += 1
            return None
        self._num_present += 1
        self._may_expire |= request.scheduling.max_queue_seconds is not None
        self._adapters.submit(request, self.now)
        return request

    def step(self) -> int:
        """Let the clock run to `next_event`, answer or plan a step; return the number of requests that left.

        Raises:
            StuckError: no event can happen any more.

        """
        num_present, pipeline = self._num_present, self._pipeline
        self.now = self.next_event
        if self._adapters.next_event <= self.now:
            self._adapters.go_on(self.now)
        elif (flight := pipeline.take_event()) is not None:
            self._answer(flight)
        self._expire()
        self._plan()
        num_stuck = self._num_present - self._adapters.num_waiting
        if (
            (num_stuck or self.next_event == math.inf)
            and self._num_present
            and not pipeline.flights
        ):
            raise StuckError(f"{self._num_present} requests can never run")
        return num_present - self._num_present

    def _new_planner(self) -> Planner:
        return self._deployment.new_planner(self._cost)

    def _expire(self) -> None:
        expired = self._waiting.expired(self.now)
        for request in expired:
            self._adapters.ended(request, self.now)
        for request in expired + self._adapters.expired(self.now):
            self.metrics.rejected["waited too long"] += 1
            self._waiting.served(request, 0)
            self._num_present -= 1
            self._left(request)

    def _plan(self) -> None:
        pipeline = self._pipeline
        last_answered = pipeline.last_answered
        while pipeline.wants_step(self.now):
            plan = self._adapters.plan(
                self._planner,
                self._waiting,
                now=self.now,
                last_sent=pipeline.last_sent,
                last_answered=last_answered,
            )
            has_put = self._put_images()
            if plan is None:
                if has_put:
                    continue
                return
            if plan.num_preempted:
                self._preempt(plan)
            self._send(plan)

    def _put_images(self) -> bool:
        """Bring pixels to the shards, which takes no time from steps; whether there were any."""
        images = self._planner.images
        puts = [] if images is None else images.take_puts()
        for features in puts:
            assert images is not None
            images.put(features)
        return bool(puts)

    def _send(self, plan: StepPlan) -> None:
        flight = self._pipeline.send(plan, plan.load, self.now)
        for row in plan.admitted:
            self._admitted(row)
        rows = self._planner.rows
        for slot, _ in plan.chunks:
            row = rows[slot]
            if row.num_prompt_left == 0:
                flight.started.append(row)
                last = flight.number + request_of(row).num_tokens_left - 1
                self._may_end.setdefault(last, []).append(row)
        for row in self._may_end.pop(flight.number, ()):
            left = request_of(row).num_tokens_left - row.num_tokens_planned
            if rows.get(row.slot) is not row:
                continue
            if left <= 0:
                flight.ended.append(row)
            else:
                self._may_end.setdefault(flight.number + left, []).append(row)
        flight.sort_ended()
        blocks = self._planner.blocks
        self.metrics.took(flight.seconds, plan.load, blocks.usage)

    def _admitted(self, row: Row) -> None:
        request = request_of(row)
        self.metrics.cached_tokens += row.num_cached
        if request.num_preemptions == 0:
            self.metrics.queue.add(self.now - request.queued_at)

    def _preempt(self, plan: StepPlan) -> None:
        """Find the preempted rows: they are dropped, but their tokens in flight count."""
        self.metrics.preemptions += plan.num_preempted
        named = [self._planner.row(slot) for slot in plan.dropped]
        preempted = [row for row in named if row is not None]
        if self._pipeline.flights:
            self._pipeline.flights[-1].preempted += preempted
        else:
            self._count_preempted(preempted)

    def _answer(self, flight: Flight) -> None:
        planner, plan = self._planner, flight.plan
        planner.computed(plan)
        for row in flight.started:
            self._first_token(request_of(row))
        for row in flight.ended:
            planner.end(row)
            self._finish(row)
        self._inter_token.step(
            self.now,
            decoded=len(plan.decodes) - flight.num_discarded,
            joined=len(flight.started),
            ended=len(flight.ended),
        )
        if plan.decodes:
            self._decoded_at = self.now
        self._count_preempted([row for row in flight.preempted if planner.row(row.slot) is row])
        planner.answered(flight.number)
        self._adapters.answered(flight.number, self.now)

    def _first_token(self, request: SimulatedRequest) -> None:
        if request.last_token_at is not None:
            self.metrics.between_tokens.add(self.now - request.last_token_at)
        else:
            seconds = self.now - request.asked_at + self._deployment.entry_seconds
            self.metrics.began(request, seconds)
        request.last_token_at = self.now

    def _finish(self, row: Row) -> None:
        request, metrics = request_of(row), self.metrics
        if self._pipeline.flights:
            # The router learns of the end only now, and has sent another decode of the row meanwhile.
            num_discarded = row.num_tokens_planned - request.num_tokens_left
            self._pipeline.flights[0].num_discarded += num_discarded
        self._num_present -= 1
        metrics.finished += 1
        metrics.output_tokens += request.output_tokens
        metrics.latency.add(self.now - request.asked_at + self._deployment.entry_seconds)
        metrics.ended_at = self.now
        self._waiting.served(request, request.output_tokens)
        self._admission.ended(request, num_cached=row.num_cached)
        self._adapters.ended(request, self.now)
        metrics.adapter_loads = self._adapters.num_loads
        self._left(request)

    def _left(self, request: SchedulableRequest) -> None:
        """A request has ended, or has waited for too long."""

    def _count_preempted(self, preempted: list[Row]) -> None:
        """Count all tokens of preempted rows, once no step in flight names them."""
        for row in preempted:
            request = request_of(row)
            request.num_generated += row.num_tokens_planned
            if request.last_token_at is not None and row.num_tokens_planned:
                if row.num_tokens_planned > 1:
                    request.last_token_at = self._decoded_at
                self._inter_token.leave(request.last_token_at)
