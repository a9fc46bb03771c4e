"""The one task that drives the shards: plan, send, await the oldest answer, deliver, drop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from itertools import count

import structlog

from millrace_router.engine.batch_metrics import BatchMetrics
from millrace_router.engine.predictor import LatencyPredictor, SchedulerSnapshot
from millrace_router.errors import (
    GenerationError,
    GrammarFailed,
    NonFiniteOutput,
    Quarantined,
    QueueExpired,
    RouterError,
    ShuttingDown,
)
from millrace_router.prediction.estimate import Estimate
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.recovery.epochs import EpochManager
from millrace_router.recovery.hang_detector import Oldest
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.recovery.recovery_policy import PlannerFactory, RecoveryPolicy
from millrace_router.recovery.shard_status import DEFAULT_TIMEOUTS, ShardStatus, Timeouts
from millrace_router.request.entry import Entry, entry_of
from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.scheduler.tenants import RequestQueue
from millrace_router.scheduler.waiting import WaitingQueue
from millrace_router.shards.errors import ShardError
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.wire import StepResult
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.tokenizer import Tokenizer

NOBODY = WaitingQueue()

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was sent and not answered."""

    number: int
    plan: StepPlan
    sent_at: float
    was_open: bool
    """Whether it was planned late, while the shards were at the one before."""

    def began_at(self, last_answer_at: float) -> float:
        """When the shards took it up: when it was sent, or were done with the one before."""
        return max(self.sent_at, last_answer_at)


class Batcher:
    """Continuous batching: entries join and leave the batch at every step.

    The task of `run` is the only writer of scheduling state. Up to `depth` steps are in flight, so the shards never
    wait for the router; what is learned one step late costs at most one discarded token. The second one is planned
    when the first is nearly done, so that whoever arrives meanwhile is in it. Whatever fails, a new epoch begins in
    which every entry in flight is replayed and goes on where it was.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        shards: StepChannel,
        new_planner: PlannerFactory,
        waiting: RequestQueue,
        prospects: LatencyPredictor,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        metrics: Metrics,
        supervisor: LauncherChannel | None = None,
        patience: Timeouts = DEFAULT_TIMEOUTS,
        depth: int = 2,
        late: LatePlanning | None = None,
    ) -> None:
        """Without `late` every step is planned as soon as it can be."""
        self.quarantine = Quarantine()
        self._metrics = BatchMetrics(metrics)
        self._lifeline = EpochManager(
            shards,
            supervisor or LauncherChannel(None),
            patience,
            prospects.cost,
            metrics,
            oldest=self._oldest,
        )
        self._rescue = rescue = RecoveryPolicy(new_planner, self.quarantine)
        self._metrics.show(lambda: rescue.planner, waiting)
        self._shards = shards
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._depth = depth
        self._late = late or LatePlanning(prospects.cost, most=0.0)
        self._waiting = waiting
        self._prospects = prospects
        self._flights: deque[_Flight] = deque()
        self._last_answered = 0
        self._answered_at = 0.0
        self._is_at_answer = False
        self._request_ids = count()
        self._wake = asyncio.Event()
        self._stopped = False

    @property
    def recovery(self) -> ShardStatus:
        """Whether the shards serve."""
        return self._lifeline.recovery

    @property
    def _planner(self) -> Planner:
        return self._rescue.planner

    def submit(self, request: ValidRequest) -> TokenStream:
        """Queue a request; its stream gets exactly one terminal event, whatever happens.

        Raises:
            ShuttingDown: nothing is accepted any more.
            ShardsGone: the shards are down, and not expected back in time.
            Quarantined: this very request broke the shards a while ago.
            Overloaded: the queue is full, or longer than the request is willing to wait.

        """
        if self._stopped:
            raise ShuttingDown
        if (refusal := self._lifeline.refusal) is not None:
            raise refusal
        if self.quarantine.refuses(request):
            raise Quarantined
        entry = self._entry(request)
        num_cached = self._planner.num_cached(entry)
        self._prospects.accept(entry, self._outlook(request.scheduling), num_cached=num_cached)
        entry.stream.when_closed(lambda: self._on_close(entry))
        self._waiting.append(entry)
        self._wake.set()
        return entry.stream

    def estimate(self, request: ValidRequest) -> Estimate:
        """What would become of `request` if it came now; nothing is queued."""
        entry = self._entry(request)
        num_cached = self._planner.num_cached(entry)
        prediction = self._prospects.predict(
            entry, self._outlook(request.scheduling), num_cached=num_cached
        )
        return Estimate(
            prediction=prediction,
            num_cached=num_cached,
            num_waiting=len(self._waiting) + self._planner.num_paused + self._rescue.num_held,
            num_running=len(self._planner.rows),
        )

    def drain_seconds(self) -> float:
        """Until there is room for one more request, as far as that is known."""
        return self._prospects.drain_seconds(self._outlook(SchedulingParameters()))

    def _entry(self, request: ValidRequest) -> Entry:
        return Entry(
            next(self._request_ids),
            request,
            self._tokenizer,
            self._eos_token_ids,
            block_size=self._planner.blocks.block_size,
        )

    def _outlook(self, scheduling: SchedulingParameters) -> SchedulerSnapshot:
        now = time.monotonic()
        began_at = self._flights[0].began_at(self._answered_at) if self._flights else now
        planner, (num_ahead, tokens_ahead) = self._planner, self._waiting.ahead(scheduling, now)
        return SchedulerSnapshot(
            rows=planner.rows.values(),
            num_waiting=len(self._waiting),
            ahead=(
                num_ahead + planner.num_paused + self._rescue.num_held,
                tokens_ahead + planner.num_paused_tokens + self._rescue.num_held_tokens,
            ),
            now_in_step=now - began_at,
        )

    async def run(self) -> None:
        """Serve for ever; cancel to stop. Ends every stream before it returns."""
        sentry = asyncio.create_task(self._lifeline.watch())
        try:
            await self._lifeline.open(self._without_shards)
            while True:
                try:
                    async with self._lifeline.interrupt:
                        while self._flights or not self._rescue.must_regroup:
                            await self._turn()
                    await self._next_epoch()
                except ShardError as error:
                    await self._recover(error)
                except Exception as error:
                    # The loop has to outlive any defect in a step.
                    log.exception("step failed")
                    await self._recover(ShardError(repr(error)))
        finally:
            self._stopped = True
            sentry.cancel()
            self._fail_admitted(GenerationError("the server is shutting down"))
            self._fail_everybody(ShuttingDown())

    async def _turn(self) -> None:
        """Keep the shards busy, then take one answer."""
        self._expire()
        rescue = self._rescue
        while len(self._flights) < self._depth and not rescue.must_regroup:
            open_seconds = self._open_seconds()
            if open_seconds > 0.0 and not await self._may_plan_after(open_seconds):
                break
            plan = rescue.planner.plan(
                NOBODY if rescue.is_searching else self._waiting,
                last_sent=self._shards.last_sent,
                last_answered=self._last_answered,
            )
            if plan is None:
                break
            await self._send(plan, was_open=open_seconds > 0.0)
        # Whatever comes now is not the router's own time.
        self._is_at_answer = False
        if self._flights:
            self._deliver(await self._shards.receive())
        elif not rescue.must_regroup:
            self._lifeline.served(computed=False)
            self._wake.clear()
            await self._wake.wait()

    def _open_seconds(self) -> float:
        """For how long from now the next step may stay undecided."""
        if not self._flights or not self._flights[0].plan.has_forward:
            return 0.0
        flight = self._flights[0]
        elapsed = time.monotonic() - flight.began_at(self._answered_at)
        return self._late.open_seconds(flight.plan.load) - elapsed

    async def _may_plan_after(self, seconds: float) -> bool:
        """Leave the next step undecided for so long; False if it is not to be decided then."""
        self._note_turn()
        if await self._shards.answers_within(seconds):
            self._late.learn(0.0)
            return False
        # Meanwhile somebody may have waited for too long, or the last suspect may have left.
        self._expire()
        return not self._rescue.must_regroup

    async def _send(self, plan: StepPlan, *, was_open: bool) -> None:
        now = time.monotonic()
        for row in plan.admitted:
            entry = entry_of(row.entry)
            entry.admitted(now, row.num_cached)
            self._prospects.admitted(entry)
        self._metrics.sent(plan)
        self._flights.append(_Flight(self._shards.last_sent + 1, plan, now, was_open))
        self._note_turn()
        await self._shards.send(plan)

    def _note_turn(self) -> None:
        """Take note of how long the router was at the last answer, once for each."""
        if self._is_at_answer:
            self._is_at_answer = False
            self._prospects.cost.overhead.add_answer(time.monotonic() - self._answered_at)

    def _deliver(self, result: StepResult) -> None:
        """Hand a step's tokens to their streams; drop what has ended with them."""
        flight, planner = self._flights.popleft(), self._planner
        answered_at = time.monotonic()
        if self._flights and flight.plan.has_forward:
            following = self._flights[0]
            self._late.learn(answered_at - following.sent_at, was_open=following.was_open)
        self._note(flight, result, answered_at)
        self._rescue.computed(flight.plan)
        for slot, logprobs in result.prompt_logprobs:
            if (row := planner.row(slot)) is not None:
                entry_of(row.entry).accept_prompt_logprobs(logprobs)
        for slot in result.failed_slots:
            if (row := planner.row(slot)) is not None:
                planner.drop(row)
                reason = result.failure_reasons.get(slot)
                failure = NonFiniteOutput() if reason is None else GrammarFailed(reason)
                self._end(row.entry, failure)
        skipped = [count - 1 for slot, count in result.counts if count and planner.row(slot)]
        for slot, token_id, logprob, top in result.tokens:
            # A row that has ended is not there any more, whatever else the step says of its slot.
            row = planner.row(slot)
            if row is None:
                continue
            entry = row.entry
            assert isinstance(entry, Entry)
            if not entry.num_generated:
                self._prospects.began(entry, answered_at)
            if entry.accept(token_id, logprob, top):
                planner.drop(row)
                self._end(entry)
        planner.answered(result.number)
        self._metrics.answered(
            flight.plan, result.timings, skipped, sent_at=flight.sent_at, answered_at=answered_at
        )

    def _note(self, flight: _Flight, result: StepResult, answered_at: float) -> None:
        """Take note of what a step has computed, and in which time."""
        plan = flight.plan
        progress = self._planner.computed(
            plan, result.failed_slots, counts=result.counts, computed=result.computed
        )
        if progress is not None:
            self._metrics.speculated(progress)
            self._prospects.yielded(progress)
        if plan.has_forward:
            seconds = answered_at - flight.began_at(self._answered_at)
            if progress is not None:
                self._planner.step_took(progress, seconds)
            self._prospects.observe(plan.load if progress is None else progress.load, seconds)
            self._lifeline.served(computed=True)
        self._last_answered, self._answered_at = result.number, answered_at
        self._is_at_answer = True

    def _end(self, request: SchedulableRequest, error: RouterError | None = None) -> None:
        """Take note that `request` has ended, with `error` unless its last token has been sent."""
        entry = entry_of(request)
        if not entry.accounted:
            entry.accounted = True
            self._prospects.ended(entry)
            self._waiting.served(entry, entry.num_generated)
            self._rescue.ended(entry)
        if error is not None:
            entry.stream.fail(error)

    async def _recover(self, error: ShardError) -> None:
        """Find out whom to blame, see to it that the shards come back, and replay everybody else in a new epoch."""
        kind = self._lifeline.failed(error)
        log.error("epoch failed", kind=kind, error=str(error), in_flight=len(self._flights))
        plans = [flight.plan for flight in self._flights]
        self._metrics.failed(plans, kind)
        ending = None
        if kind == "out_of_memory" and plans:
            ending = self._rescue.shrink(plans[0])
        elif kind != "planned":
            ending = self._rescue.blame(plans)
        if ending is not None:
            self._metrics.ended(ending[1])
            self._end(*ending)
        self._lifeline.restart(kind, error, num_suspects=self._rescue.num_suspects)
        await self._next_epoch()

    async def _next_epoch(self) -> None:
        self._flights.clear()
        self._last_answered = 0
        self._metrics.replayed(self._rescue.next_epoch())
        await self._lifeline.open(self._without_shards)

    def _oldest(self) -> Oldest | None:
        if not self._flights:
            return None
        flight = self._flights[0]
        return Oldest(flight.number, flight, flight.plan.load)

    def _expire(self) -> None:
        if not len(self._waiting):
            return
        for entry in self._waiting.expired(time.monotonic()):
            self._end(entry, QueueExpired(retry_after_seconds=self.drain_seconds()))

    def _without_shards(self, error: RouterError | None) -> None:
        """Time passes while no epoch is open; with an error it will not be before long."""
        self._expire()
        if error is not None:
            self._fail_everybody(error)

    def _fail_everybody(self, error: RouterError) -> None:
        self._fail_admitted(error)
        while len(self._waiting):
            self._end(self._waiting.pop(), error)

    def _fail_admitted(self, error: RouterError) -> None:
        for entry in self._rescue.surrender():
            self._end(entry, error)

    def _on_close(self, entry: Entry) -> None:
        """A reader has left: a waiting entry goes at once, a running one with the next step."""
        self._waiting.discard(entry)
        self._end(entry)
        self._wake.set()
