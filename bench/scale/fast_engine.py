"""An engine that runs through steps without a decision at once: every row decodes, no request joins, no row ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat

from millrace.simulate.adapters import SimulatedAdapters
from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.metrics import InterTokenLatencies, SimulationMetrics
from millrace.simulate.pipeline import Flight, Pipeline
from millrace.simulate.simulated_request import PrefixNames, request_of
from millrace_router.prediction.step_load import StepLoad
from millrace_router.scheduler.block_manager import BlockManager, advance, grow
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.preemption import LOOKAHEAD
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import Row, StepPlan

_LEAST_FAST_FORWARD = 3
"""Least number of steps to fast-forward; doing so costs about as much as two steps."""


class FastPlanner(Planner):
    """Plans and computes several steps at once where each of them decodes every row."""

    @property
    def only_decodes(self) -> bool:
        """Whether all rows have a planned token, and none is leaving, preempted or multi-token."""
        if self._to_drop or self._retired or self.num_paused or self._multi_token.slots:
            return False
        return all(row.num_tokens_planned for row in self.rows.values())

    def decode_steps(self, *, num_planned: int, num_computed: int) -> None:
        """Plan and compute several steps at once, each of which decodes every row.

        Blocks must suffice, no request may join, and no row may end meanwhile.
        """
        grown: list[tuple[int, int]] = []
        for row in self.rows.values():
            row.num_tokens_planned += num_planned
            row.num_kv_tokens += num_planned
            if row.num_kv_tokens > row.num_kv_owned:
                grow(row, self.blocks, grown)
        filled = zip(self.rows, repeat(num_computed), strict=False)
        advance(filled, (self.rows, self._preempted), self.blocks, ())


class FastPipeline(Pipeline):
    """Sends and answers equal steps without a call for each."""

    def repeat(self, plan: StepPlan, *, most: int, until: float) -> tuple[list[float], list[float]]:
        """Send `plan` repeatedly and answer steps in flight, as `take_event`, `wants_step` and `send` would.

        Each step attends to one position per row more than the previous one. Stops before the first event at or after
        `until`, and before more than `most` steps are sent. Returns the duration of each step sent, in seconds, and
        the times at which steps were answered.
        """
        first = self._cost.seconds(plan.load) or 0.0
        farthest = replace(plan.load, context=plan.load.context + plan.load.decodes * most)
        slope = ((self._cost.seconds(farthest) or 0.0) - first) / most
        depth, ratios, open_part = self._depth, self._ratios, self._late.open_part
        free_at, open_until = self._shards_free_at, self._open_until
        known = ((f.began_at, f.predicted, f.seconds, f.answered_at, f) for f in self.flights)
        flights: deque[tuple[float, float, float, float, Flight | None]] = deque(known)
        sent: list[float] = []
        answered: list[float] = []
        while True:
            # Runs for every step, so it makes few calls.
            is_answer = open_until is None
            now = flights[0][3] if open_until is None else open_until
            if now >= until or len(sent) + depth - len(flights) + is_answer > most:
                break
            if is_answer:
                flights.popleft()
                answered.append(now)
            open_until = None
            while len(flights) < depth:
                if flights:
                    began_at, predicted, _, answered_at, _ = flights[0]
                    opens_until = began_at + open_part(predicted)
                    if opens_until > now:
                        open_until = opens_until if opens_until < answered_at else None
                        break
                predicted = first + slope * len(sent)
                seconds = predicted * next(ratios)
                began_at = max(free_at, now)
                free_at = began_at + seconds
                flights.append((began_at, predicted, seconds, free_at + self._turn_seconds, None))
                sent.append(seconds)
        self._shards_free_at, self._open_until = free_at, open_until
        self.last_sent += len(sent)
        self.flights.clear()
        number = self.last_sent - len(flights)
        for began_at, predicted, seconds, answered_at, flight in flights:
            number += 1
            new = Flight(number, plan, began_at, predicted, seconds, answered_at)
            self.flights.append(new if flight is None else flight)
        return sent, answered


class FastAdapters(SimulatedAdapters):
    """Counts steps that were not planned one by one."""

    @property
    def is_settled(self) -> bool:
        """Whether no sequence is about to leave the shards."""
        return self._admission.is_settled

    def count_load(self, plan: StepPlan) -> None:
        """Count the adapters of a step that was not planned by `plan`."""
        self._admission.count_load(plan)


class FastLatencies(InterTokenLatencies):
    """Counts steps that decode the same streams."""

    def steps(self, times: Sequence[float], *, decoded: int) -> None:
        """Count steps answered at `times`; in each, the same streams got a token and none ended."""
        for now in times:
            last, count = self._streams[-1] if self._streams else (now, 0)
            if count == decoded:
                # The same as `step`, but faster.
                self._seconds.add(now - last, count)
                self._streams[-1] = (now, count)
            else:
                self.step(now, decoded=decoded, joined=0, ended=0)


class FastEngine(Engine):
    """Has the figures of `Engine`, some of them with another last digit."""

    _planner: FastPlanner
    _pipeline: FastPipeline
    _adapters: FastAdapters
    _inter_token: FastLatencies

    def __init__(
        self,
        deployment: Deployment,
        prefixes: PrefixNames | None = None,
        metrics: SimulationMetrics | None = None,
    ) -> None:
        super().__init__(deployment, prefixes)
        if metrics is not None:
            self.metrics = metrics
        self._pipeline = FastPipeline(deployment, self._cost, self._late)
        self._adapters = FastAdapters(deployment, self._waiting)
        self._inter_token = FastLatencies(self.metrics.between_tokens)

    def _new_planner(self) -> FastPlanner:
        deployment = self._deployment
        cache = PrefixCache() if deployment.prefix_caching == "on" else None
        blocks = BlockManager(deployment.num_blocks, deployment.block_size, cache)
        return FastPlanner(deployment.budgets, blocks, self._cost)

    def run_until(self, time: float) -> None:
        """As `Engine`."""
        while self.next_event < time:
            if not self.fast_forward(time):
                self.step()

    def fast_forward(self, until: float) -> bool:
        """Let the clock run through events before `until` that need no decision; False if the next event needs one.

        No request joins, every row decodes in each step, and no row ends, so the planner counts all steps at once.
        """
        pipeline, planner = self._pipeline, self._planner
        if not pipeline.flights or not self._adapters.is_settled:
            return False
        until = min(until, self._adapters.next_event)
        if until - self.now < _LEAST_FAST_FORWARD * pipeline.flights[-1].predicted:
            return False
        ends_at, depth = min(self._may_end, default=0), self._deployment.steps_in_flight
        most = last_alike(self._may_end, planner, pipeline.last_sent, depth) - pipeline.last_sent
        if most >= _LEAST_FAST_FORWARD:
            most = min(most, num_uneventful_steps(planner, pipeline.flights))
        if most < _LEAST_FAST_FORWARD or waiting_matters(
            self._waiting, planner, pipeline.flights, may_expire=self._may_expire
        ):
            return False
        plan, before = decode_all(planner), list(pipeline.flights)
        self._adapters.count_load(plan)
        sent, answered = pipeline.repeat(plan, most=most, until=until)
        count_steps(self.metrics, planner, sent, plan.load)
        for flight, self.now in zip(before, answered, strict=False):
            self._answer(flight)
        later = answered[len(before) :]
        self._inter_token.steps(later, decoded=len(plan.decodes))
        if later:
            self.now = self._decoded_at = later[-1]
        planner.decode_steps(num_planned=len(sent), num_computed=len(later))
        if pipeline.last_sent >= ends_at:
            flight = pipeline.flights[ends_at - pipeline.last_sent - 1]
            flight.ended = self._may_end.pop(ends_at)
            flight.sort_ended()
        return bool(sent or answered)


def num_uneventful_steps(planner: FastPlanner, flights: Collection[Flight]) -> int:
    """The number of steps in which, by the number of blocks, the planner decodes every row and does nothing else.

    A lower bound: it may be less than the true number.
    """
    rows, blocks = planner.rows, planner.blocks
    if not (rows and planner.only_decodes and not any(map(_ends_rows, flights))):
        return 0
    # The order of evictions must not depend on the moment at which a block is found to be cached already.
    if any(request_of(row).may_repeat_blocks for row in rows.values()):
        return 0
    # Each row takes a block in `block_size` steps, and one more at most. No row may be preempted.
    return (blocks.num_available // len(rows) - LOOKAHEAD - 1) * blocks.block_size


def _ends_rows(flight: Flight) -> bool:
    """Whether a row that the step computes does not go on."""
    return bool(flight.ended or flight.preempted or flight.num_discarded)


def last_alike(
    may_end: Mapping[int, Sequence[Row]],
    planner: Planner,
    last_sent: int,
    depth: int,
) -> int:
    """Number of the last step that decodes every row; `may_end` has the rows by the first step that may end them.

    The first of those steps still decodes every row, and so do the steps sent before the router learns of that end,
    `depth` in all.
    """
    ends_at = min(may_end, default=0)
    last = ends_at + depth - 1
    for row in may_end.get(ends_at, ()):
        num_planned = row.num_tokens_planned + ends_at - last_sent
        if planner.rows.get(row.slot) is not row or num_planned != request_of(row).num_tokens_left:
            return ends_at - 1
        last = min(last, ends_at + row.max_tokens - num_planned)
    return min([last, *(other - 1 for other in may_end if other > ends_at)])


def decode_all(planner: Planner) -> StepPlan:
    """The next step, if it decodes every row."""
    rows = planner.rows
    context = len(rows) + sum([row.num_kv_tokens for row in rows.values()])
    return StepPlan(decodes=list(rows), load=StepLoad(decodes=len(rows), context=context))


def blocks_grown(planner: Planner, num_steps: int) -> list[int]:
    """Blocks that all rows together take in each of the next steps, if all rows decode."""
    grown, size = [0] * num_steps, planner.blocks.block_size
    for row in planner.rows.values():
        for step in range(row.num_kv_owned - row.num_kv_tokens, num_steps, size):
            grown[step] += 1
    return grown


def count_steps(
    metrics: SimulationMetrics, planner: Planner, sent: Sequence[float], load: StepLoad
) -> None:
    """Count steps of these durations that decode every row."""
    blocks = planner.blocks
    num_owned = blocks.num_owned
    for seconds, grown in zip(sent, blocks_grown(planner, len(sent)), strict=True):
        num_owned += grown
        metrics.took(seconds, load, num_owned / blocks.num_blocks)


def waiting_matters(
    waiting: RequestQueue, planner: Planner, flights: Iterable[Flight], *, may_expire: bool
) -> bool:
    """Whether waiting requests may change a plan before a row ends."""
    if not len(waiting):
        return False
    if planner.budgets.share_slots or may_expire:
        return True
    # The head of the queue may wait for blocks of a prompt in flight.
    is_computing = any(flight.plan.chunks for flight in flights)
    return is_computing or not planner.lacks_room(waiting)
