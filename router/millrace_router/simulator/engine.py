"""One replica under a virtual clock: the router's own queue and planner, driven as the batcher drives them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import count, cycle

from millrace_router.cost import CostModel
from millrace_router.policies import late_planning_from
from millrace_router.request import Terms
from millrace_router.row import Row
from millrace_router.simulator.arrival import Arrival
from millrace_router.simulator.candidate import Candidate, PrefixNames
from millrace_router.simulator.deployment import Deployment
from millrace_router.simulator.distribution import Distribution
from millrace_router.simulator.door import Door
from millrace_router.simulator.gaps import Gaps
from millrace_router.simulator.tally import Tally
from millrace_router.step_plan import StepPlan


class StuckError(Exception):
    """Requests wait, nothing runs, and the planner admits none: a defect of the scheduler."""


@dataclass(slots=True)
class _Flight:
    """A step that is not answered yet, and what its answer will tell the router."""

    number: int
    plan: StepPlan[Candidate]
    began_at: float
    predicted: float
    """Seconds it was to take."""
    answered_at: float
    started: list[Row[Candidate]] = field(default_factory=list)
    """Rows whose input it completes, so that it yields their first token since admission."""
    ended: list[Row[Candidate]] = field(default_factory=list)
    """Rows whose last token it yields."""
    preempted: list[Row[Candidate]] = field(default_factory=list)
    """Rows that were preempted after it, so that it is the last to name them."""
    num_discarded: int = 0
    """Tokens of rows that had ended when it was answered."""

    def sort_ended(self) -> None:
        """Let rows end in the order of the answer: who releases blocks first decides which are evicted first."""
        if len(self.ended) > 1:
            decodes = self.plan.decodes
            begun = [row for row in self.started if row in self.ended]
            others = [row for row in self.ended if row not in begun]
            self.ended = begun + sorted(others, key=lambda row: decodes.index(row.slot))


class Engine:
    """Router and shards of one replica.

    A step takes what the cost model says, times the next of the deployment's ratios, which repeat. Its tokens are given
    out, and the next step is planned, so long after it as the router takes for an answer. What it takes for a request
    counts from its arrival to its tokens, and delays nothing else.

    Steps are planned when the batcher plans them: when a request arrives while none is in flight, when one is answered,
    or late in the one that the shards are at.
    Step n + 1 begins when step n ends, or when it is sent if that is later. Since it is known how long each answer is
    going to be, a row is looked at when it begins and where it may end, and not for each of its tokens.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.tally = Tally(replicas=1)
        self.now = 0.0
        self._deployment = deployment
        self._cost = CostModel.fixed(deployment.cost_model)
        self._waiting = deployment.new_queue()
        self._planner = deployment.new_planner(self._cost)
        self._late = late_planning_from(deployment, self._cost, most=deployment.late_planning_share)
        self._door = Door(
            deployment,
            cost=self._cost,
            planner=self._planner,
            waiting=self._waiting,
            late=self._late,
        )
        self._prefixes = PrefixNames()
        self._ratios = cycle(deployment.step_ratios or (1.0,))
        self._gaps = Gaps(self.tally.between_tokens)
        self._flights: deque[_Flight] = deque()
        self._last_sent = 0
        self._open_until: float | None = None
        """When the step beside the one in flight is to be planned, while it is open."""
        self._shards_free_at = 0.0
        self._decoded_at = 0.0
        """When the last step that decoded was answered."""
        self._num_present = 0
        self._request_ids = count()
        self._may_end: dict[int, list[Row[Candidate]]] = {}
        """Rows by the first step that may yield their last token."""

    @property
    def next_event(self) -> float:
        """When `step` has something to do; infinity when there is nothing."""
        if self._open_until is not None:
            return self._open_until
        if self._flights:
            return self._flights[0].answered_at
        return self.now if self._num_present else math.inf

    def arrive(self, arrival: Arrival) -> bool:
        """Take a request at its time, which is no earlier than `now`; False if it is refused."""
        self.now = arrival.arrived_at
        self.tally.offered += 1
        self.tally.started_at = min(self.tally.started_at, self.now)
        candidate = self._candidate(arrival)
        reason = self._door.refusal(
            candidate, num_present=self._num_present, now_in_step=self.now - self._began_at
        )
        if reason is not None:
            self.tally.rejected[reason] += 1
            return False
        self._num_present += 1
        self._waiting.append(candidate)
        return True

    def step(self) -> int:
        """Let the clock run to `next_event`, answer a step or plan one; how many requests have left.

        Raises:
            StuckError: nothing can ever happen again.

        """
        num_present = self._num_present
        if self._open_until is not None:
            self.now = self._open_until
        elif self._flights:
            flight = self._flights.popleft()
            self.now = flight.answered_at
            self._answer(flight)
        self._expire()
        self._plan(last_answered=self._last_sent - len(self._flights))
        if self._num_present and not self._flights:
            raise StuckError(f"{self._num_present} requests wait for ever")
        return num_present - self._num_present

    def _candidate(self, arrival: Arrival) -> Candidate:
        room = self._deployment.max_total_tokens - arrival.prompt_tokens
        return Candidate(
            next(self._request_ids),
            arrival,
            terms=_terms(arrival),
            max_new_tokens=min(room, arrival.max_new_tokens or room),
            block_size=self._deployment.block_size,
            prefixes=self._prefixes,
        )

    @property
    def _began_at(self) -> float:
        """When the shards took up the oldest step in flight; now where there is none."""
        return self._flights[0].began_at if self._flights else self.now

    def _expire(self) -> None:
        for candidate in self._waiting.expired(self.now):
            self.tally.rejected["waited too long"] += 1
            self._waiting.served(candidate, 0)
            self._num_present -= 1

    def _plan(self, *, last_answered: int) -> None:
        while len(self._flights) < self._deployment.steps_in_flight:
            if self._stays_open():
                return
            plan = self._planner.plan(
                self._waiting, last_sent=self._last_sent, last_answered=last_answered
            )
            if plan is None:
                return
            if plan.num_preempted:
                self._preempt(plan)
            self._send(plan)

    def _stays_open(self) -> bool:
        """Whether the next step is to be planned later, while the one in flight is computed."""
        if not self._flights:
            return False
        flight = self._flights[0]
        open_until = flight.began_at + self._late.open_part(flight.predicted)
        is_open = open_until > self.now
        # The answer may come before.
        self._open_until = open_until if is_open and open_until < flight.answered_at else None
        return is_open

    def _send(self, plan: StepPlan[Candidate]) -> None:
        self._last_sent += 1
        predicted = (self._cost.seconds(plan.load) or 0.0) if plan.has_forward else 0.0
        seconds = predicted * next(self._ratios)
        began_at = max(self.now, self._shards_free_at)
        self._shards_free_at = began_at + seconds
        answered_at = self._shards_free_at + self._deployment.turn_seconds
        flight = _Flight(self._last_sent, plan, began_at, predicted, answered_at)
        for row in plan.admitted:
            self._admitted(row)
        rows = self._planner.rows
        for slot, _ in plan.chunks:
            row = rows[slot]
            if row.num_prompt_left == 0:
                flight.started.append(row)
                last = self._last_sent + _num_tokens_left(row) - 1
                self._may_end.setdefault(last, []).append(row)
        for row in self._may_end.pop(self._last_sent, ()):
            left = _num_tokens_left(row) - row.num_tokens_planned
            if rows.get(row.slot) is not row:
                continue
            if left <= 0:
                flight.ended.append(row)
            else:
                self._may_end.setdefault(self._last_sent + left, []).append(row)
        flight.sort_ended()
        self._flights.append(flight)
        self._observe(plan, seconds)

    def _admitted(self, row: Row[Candidate]) -> None:
        candidate = row.entry
        self.tally.cached_tokens += row.num_cached
        if candidate.num_preemptions == 0:
            self.tally.queue.add(self.now - candidate.queued_at)

    def _preempt(self, plan: StepPlan[Candidate]) -> None:
        """Find who was preempted: they are dropped, and yet their tokens in flight count."""
        self.tally.preemptions += plan.num_preempted
        named = [self._planner.row(slot) for slot in plan.dropped]
        preempted = [row for row in named if row is not None]
        if self._flights:
            self._flights[-1].preempted += preempted
        else:
            self._settle(preempted)

    def _answer(self, flight: _Flight) -> None:
        planner, plan = self._planner, flight.plan
        planner.computed(plan)
        for row in flight.started:
            self._first_token(row.entry)
        for row in flight.ended:
            planner.drop(row)
            self._finish(row)
        self._gaps.step(
            self.now,
            decoded=len(plan.decodes) - flight.num_discarded,
            joined=len(flight.started),
            ended=len(flight.ended),
        )
        if plan.decodes:
            self._decoded_at = self.now
        self._settle([row for row in flight.preempted if planner.row(row.slot) is row])
        planner.answered(flight.number)

    def _first_token(self, candidate: Candidate) -> None:
        if candidate.last_token_at is not None:
            self.tally.between_tokens.add(self.now - candidate.last_token_at)
        else:
            seconds = self.now - candidate.queued_at + self._deployment.entry_seconds
            self.tally.first_token.add(seconds)
            if candidate.tenant:
                of_tenant = self.tally.first_token_of.setdefault(candidate.tenant, Distribution())
                of_tenant.add(seconds)
        candidate.last_token_at = self.now

    def _finish(self, row: Row[Candidate]) -> None:
        candidate, tally = row.entry, self.tally
        if self._flights:
            # The router learns of the end only now, and has sent another decode meanwhile.
            self._flights[0].num_discarded += row.num_tokens_planned - _num_tokens_left(row)
        self._num_present -= 1
        tally.finished += 1
        tally.output_tokens += candidate.output_tokens
        tally.latency.add(self.now - candidate.queued_at + self._deployment.entry_seconds)
        tally.ended_at = self.now
        self._waiting.served(candidate, candidate.output_tokens)
        self._door.ended(candidate, num_cached=row.num_cached)

    def _settle(self, preempted: list[Row[Candidate]]) -> None:
        """Take note of what preempted rows have got in all, now that no step names them any more."""
        for row in preempted:
            candidate = row.entry
            candidate.num_generated += row.num_tokens_planned
            if candidate.last_token_at is not None and row.num_tokens_planned:
                if row.num_tokens_planned > 1:
                    candidate.last_token_at = self._decoded_at
                self._gaps.leave(candidate.last_token_at)

    def _observe(self, plan: StepPlan[Candidate], seconds: float) -> None:
        tally, load, blocks = self.tally, plan.load, self._planner.blocks
        used = blocks.num_owned / blocks.num_blocks
        tally.steps += 1
        tally.prefill_tokens += load.prefill_tokens
        tally.busy_seconds += seconds
        tally.row_seconds += seconds * (load.decodes + load.num_chunks)
        tally.kv_seconds += seconds * used
        tally.kv_max = max(tally.kv_max, used)


def _terms(arrival: Arrival) -> Terms:
    return Terms(
        priority=arrival.priority,
        tenant=arrival.tenant,
        max_queue_seconds=arrival.max_queue_seconds,
    )


def _num_tokens_left(row: Row[Candidate]) -> int:
    """Tokens that its answer had left when it was admitted."""
    return row.entry.output_tokens - row.entry.num_generated
