"""The task that drives the shards: plan, send, receive, deliver, drop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from millrace_router.engine.adapter_hooks import AdapterHooks
from millrace_router.engine.batch_metrics import BatchMetrics
from millrace_router.engine.image_loading import ImageLoading
from millrace_router.engine.in_flight import AnsweredStep, InFlight
from millrace_router.engine.predictor import LatencyPredictor
from millrace_router.engine.relay import Relay
from millrace_router.errors import (
    GenerationError,
    GrammarFailed,
    InternalError,
    NonFiniteOutput,
    NotResumable,
    Quarantined,
    QueueExpired,
    RouterError,
    ShuttingDown,
    as_failure,
)
from millrace_router.prediction.forecast import Estimate
from millrace_router.recovery.epochs import EpochManager
from millrace_router.recovery.recovery_policy import RecoveryPolicy
from millrace_router.request.entry import Entry, entry_of
from millrace_router.request.request import ValidRequest
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.queue import RequestQueue, WaitingQueue
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.errors import ShardError
from millrace_router.shards.step_result import StepResult

EMPTY_QUEUE = WaitingQueue()

log = structlog.get_logger(__name__)


class Batcher:
    """Continuous batching: entries join and leave the batch at every step.

    Only the task of `run` changes scheduling state. A token computed for an entry that ended one step earlier is
    discarded. After a failure a new epoch begins, in which the tokens of all entries are computed again and every
    stream goes on where it was.
    """

    def __init__(  # noqa: PLR0913
        self,
        in_flight: InFlight,
        epochs: EpochManager,
        recovery: RecoveryPolicy,
        *,
        waiting: RequestQueue,
        predictor: LatencyPredictor,
        new_entry: Callable[[ValidRequest], Entry],
        metrics: BatchMetrics,
        adapters: AdapterHooks | None = None,
        images: ImageLoading | None = None,
    ) -> None:
        """`in_flight`, `epochs` and `adapters` use the same channel; `new_entry` makes an entry with a new id.

        `adapters` is for shards that take them, `images` for a model that reads them.
        """
        self._in_flight = in_flight
        self._epochs = epochs
        self._recovery = recovery
        self._waiting = waiting
        self._predictor = predictor
        self._new_entry = new_entry
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._stopped = False
        self._is_leaving = False
        self.released = asyncio.Event()
        """Set while the shards are another router's."""
        self._stays = asyncio.Event()
        self._relay: Relay | None = None
        """Has all entries once another router computes them."""
        self._num_recorded = 0
        """Entries whose tokens are recorded."""
        self._adapters = adapters or AdapterHooks()
        self._adapters.connect(
            end=self._end,
            wake=self._wake.set,
            report=epochs.interrupt.trigger,
        )
        self._images = images
        if images is not None:
            images.connect(end=self._end, wake=self._wake.set, report=epochs.interrupt.trigger)
        epochs.prepare = self._restore_adapters
        epochs.recovery = recovery
        metrics.show(lambda: recovery.planner, waiting, predictor.wait_seconds)

    @property
    def _planner(self) -> Planner:
        return self._recovery.planner

    def submit(self, request: ValidRequest, *, is_accepted: bool = False) -> TokenStream:
        """Queue a request. Its stream gets exactly one terminal event.

        With `is_accepted` it is not refused as one too many: another router has accepted it.

        Raises:
            ShuttingDown: the server is stopping.
            ShardsGone: the shards are down, and not expected back in time.
            Quarantined: an equal request broke the shards a while ago.
            Overloaded: the queue is full, or the predicted wait exceeds the request's limit.
            AdapterTooLarge: its adapter is larger than the memory for adapters.
            AdapterUnavailable: its adapter could not be loaded just now.
            NotResumable: it has tokens of another request.

        """
        if self._stopped:
            raise ShuttingDown
        if self._relay is None and (refusal := self._epochs.refusal) is not None:
            raise refusal
        if self._recovery.quarantine.refuses(request):
            raise Quarantined
        if request.adapter is not None:
            self._adapters.check(request.adapter)
        if self._images is not None:
            self._images.check(request)
        entry = self._new_entry(request)
        if entry.resume():
            entry.accounted = True
            return entry.stream
        if not (entry.num_preemptions or is_accepted):
            self._predictor.accept(entry)
        self._num_recorded += request.choice is not None
        entry.stream.when_closed(lambda: self._on_close(entry))
        if self._relay is not None:
            self._relay.add(entry)
        elif request.adapter is None:
            self._waiting.append(entry)
        else:
            self._adapters.submit(entry)
        self._wake.set()
        return entry.stream

    def estimate(self, request: ValidRequest) -> Estimate:
        """Predict the times of `request` if it arrived now. Queues nothing."""
        return self._predictor.estimate(self._new_entry(request))

    def drain_seconds(self) -> float:
        """Predicted seconds until one more request fits."""
        return self._predictor.drain_seconds()

    async def run(self) -> None:
        """Serve until cancelled. Every stream has ended when it returns."""
        watching = self._epochs.watch()
        try:
            await self._epochs.open(self._wait_for_shards)
            while True:
                try:
                    async with self._epochs.interrupt:
                        while self._in_flight or not self._pauses:
                            await self._serve_step()
                    await self._next_epoch(keep=await self._leave())
                except ShardError as error:
                    await self._recover(error)
                except BaseException as error:
                    failure = as_failure(error)
                    # A defect in one step must not end the loop.
                    log.exception("step failed")
                    await self._recover(ShardError(repr(failure)))
        finally:
            self._stopped = True
            watching.cancel()
            self._adapters.close_epoch()
            if self._images is not None:
                self._images.close_epoch()
            self._fail_admitted(GenerationError("the server is shutting down"))
            self._fail_all(ShuttingDown())

    def leave(self) -> None:
        """Let the steps in flight end, and then the shards be another router's: `released`."""
        self._stays.clear()
        self._is_leaving = True
        self._wake.set()

    def stay(self) -> None:
        """Take the shards back, with all requests."""
        self._is_leaving = False
        self._stays.set()

    def relay(self) -> Relay:
        """Return the relay of all requests, which another router computes from now on."""
        if self._relay is None:
            relay = Relay(self._end)
            entries = [*self._recovery.take_all(), *self._adapters.waiting()]
            while len(self._waiting):
                entries.append(self._waiting.pop())
            for request in entries:
                relay.add(entry_of(request))
            self._relay = relay
        return self._relay

    async def _leave(self) -> bool:
        """Wait while the shards are another router's; return whether the next epoch may keep KV."""
        if not self._is_leaving:
            return False
        self._adapters.close_epoch()
        keep = await self._epochs.close()
        self.released.set()
        await self._stays.wait()
        self.released.clear()
        self._epochs.interrupt.clear()
        return keep

    @property
    def _pauses(self) -> bool:
        """Whether no further step is planned in this epoch."""
        return self._recovery.must_regroup or self._is_leaving

    async def _serve_step(self) -> None:
        """Send steps while there is room for them, then deliver the oldest answer."""
        while self._in_flight.has_room and not self._pauses:
            plan = await self._plan()
            if plan is None:
                break
            await self._send(plan)
        if self._in_flight:
            self._deliver(await self._in_flight.receive())
        elif not self._pauses:
            self._in_flight.idle()
            self._epochs.end_outage()
            self._wake.clear()
            await self._wake.wait()

    async def _plan(self) -> StepPlan | None:
        """Return the next step; None if there is nothing to compute, or an answer to deliver first."""
        in_flight, recovery = self._in_flight, self._recovery
        if not await in_flight.wait_to_plan():
            return None
        self._expire()
        # The last suspect of a group may have ended during the wait.
        if self._pauses:
            return None
        self._adapters.before_plan(recovery.planner)
        if (ledger := recovery.planner.blocks.ledger) is not None:
            ledger.generation = in_flight.next_generation
        plan = recovery.planner.plan(
            EMPTY_QUEUE if recovery.is_searching else self._waiting,
            last_sent=in_flight.last_sent,
            last_answered=in_flight.last_answered,
        )
        self._adapters.after_plan(recovery.planner)
        if self._images is not None:
            self._images.after_plan(recovery.planner)
        return plan

    async def _send(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for row in plan.admitted:
            entry = entry_of(row.entry)
            entry.admitted(now, row.num_cached)
            self._predictor.admitted(entry)
        self._metrics.sent(plan)
        self._adapters.sent(plan, self._in_flight.last_sent + 1)
        await self._in_flight.send(plan)

    def _deliver(self, step: AnsweredStep) -> None:
        """Deliver the tokens of a step to their streams, and drop the rows that ended with it."""
        self._learn_from(step)
        if step.plan.has_forward or step.plan.encodes:
            self._epochs.step_computed()
        self._recovery.computed(step.plan)
        planner, result = self._planner, step.result
        self._deliver_prompts(step)
        self._drop_failed(result)
        if self._num_recorded:
            self._record(result)
        skipped = [count - 1 for slot, count in result.counts if count and planner.row(slot)]
        for slot, token_id, logprob, top in result.tokens:
            # Further tokens of a row that has ended are discarded.
            row = planner.row(slot)
            if row is None:
                continue
            entry = row.entry
            assert isinstance(entry, Entry)
            if not entry.num_generated:
                self._predictor.began(entry, step.answered_at)
            try:
                is_last = entry.accept(token_id, logprob, top)
            except NotResumable as error:
                planner.drop(row)
                self._end(entry, error)
                continue
            except BaseException as error:
                as_failure(error)
                # A token without a text is this request's fault, not the step's.
                log.exception("a token cannot be delivered")
                planner.drop(row)
                self._end(entry, InternalError())
                continue
            if is_last:
                planner.end(row)
                self._end(entry)
        planner.answered(result.number)
        self._adapters.answered(result.number)
        self._metrics.answered(step, skipped)

    def _record(self, result: StepResult) -> None:
        """Record the tokens of a step for the next router, before the first of them is sent."""
        planner, choice = self._planner, None
        for slot, token_id, logprob, _ in result.tokens:
            row = planner.row(slot)
            if row is None:
                continue
            entry = row.entry
            assert isinstance(entry, Entry)
            if entry.request.choice is None:
                continue
            choice = entry.request.choice
            try:
                entry.record(token_id, logprob)
            except NotResumable as error:
                planner.drop(row)
                self._end(entry, error)
        if choice is not None:
            choice.flush()

    def _learn_from(self, step: AnsweredStep) -> None:
        """Record the positions that a step computed, and its duration."""
        plan, result, planner = step.plan, step.result, self._planner
        progress = planner.computed(
            plan,
            result.failed_slots,
            counts=result.counts,
            computed=result.computed,
            failed_images=result.failed_images,
        )
        if self._images is not None and planner.images is not None:
            self._images.computed(planner.images)
        if progress is not None:
            self._metrics.speculated(progress)
            self._predictor.yielded(progress)
        if plan.has_forward:
            if progress is not None:
                planner.step_took(progress, step.seconds)
            load = plan.load if progress is None else progress.load
            self._predictor.cost.observe(load, step.seconds)
        elif plan.encodes:
            # The shards may answer the step before only after this one has run.
            seconds = max(step.seconds, result.timings.forward)
            self._predictor.cost.observe(plan.load, seconds)

    def _deliver_prompts(self, step: AnsweredStep) -> None:
        """Deliver what a step computed of prompts, and note closed texts; a pooled request ends with its prompt."""
        planner, result = self._planner, step.result
        for slot in result.closed_slots:
            if (row := planner.row(slot)) is not None:
                entry_of(row.entry).is_closed = True
        for slot, logprobs in result.prompt_logprobs:
            if (row := planner.row(slot)) is not None:
                entry_of(row.entry).accept_prompt_logprobs(logprobs)
        for slot, values in result.pooled:
            if (row := planner.row(slot)) is not None:
                entry = entry_of(row.entry)
                entry.accept_pooled(values)
                planner.end(row)
                self._predictor.began(entry, step.answered_at)
                self._end(entry)

    def _drop_failed(self, result: StepResult) -> None:
        for slot in result.failed_slots:
            if (row := self._planner.row(slot)) is not None:
                self._planner.drop(row)
                reason = result.failure_reasons.get(slot)
                failure = NonFiniteOutput() if reason is None else GrammarFailed(reason)
                self._end(row.entry, failure)

    def _end(self, request: SchedulableRequest, error: RouterError | None = None) -> None:
        """Record the end of `request`, with `error` unless its last token was delivered or its client left."""
        entry = entry_of(request)
        if not entry.accounted:
            entry.accounted = True
            if entry.images and self._planner.images is not None:
                self._planner.images.release(entry)
            self._num_recorded -= entry.request.choice is not None
            self._predictor.ended(entry)
            self._waiting.served(entry, entry.num_generated)
            self._recovery.ended(entry)
            if entry.adapter is not None:
                self._adapters.ended(entry)
            if self._relay is not None:
                self._relay.drop(entry)
        if error is not None:
            entry.stream.fail(error)

    async def _recover(self, error: ShardError) -> None:
        """End the entry that caused a failure if it is known, and begin a new epoch with all others."""
        kind = self._epochs.fail(error)
        plans = self._in_flight.plans
        log.error(
            "shards failed; replaying",
            kind=kind,
            error=str(error),
            steps_in_flight=len(plans),
            running=len(self._planner.rows),
            waiting=len(self._waiting),
        )
        self._metrics.failed(plans, kind)
        ending = None
        if self._encode_failed(kind, plans):
            # No row is at fault.
            pass
        elif kind == "out_of_memory" and plans:
            ending = self._recovery.shrink(plans[0])
        elif kind != "planned":
            ending = self._recovery.find_poison(plans)
        if ending is not None:
            self._metrics.ended(ending[1])
            self._end(*ending)
        self._epochs.restart(kind, error, num_suspects=self._recovery.num_suspects)
        await self._next_epoch(keep=self._epochs.may_keep_kv(kind))

    def _encode_failed(self, kind: str, plans: Sequence[StepPlan]) -> bool:
        """Return whether the step that failed has encoded pictures; those that fail again and again are given up."""
        images, features = self._images, self._planner.images
        if images is None or features is None or kind == "planned" or not plans:
            return False
        has_encoded, requests = images.failed(plans[0], features)
        for request in requests:
            entry, error = entry_of(request), Quarantined()
            self._recovery.quarantine.add(
                entry.request,
                num_generated=entry.num_generated,
                reason="an image of it failed while it was encoded",
            )
            self._metrics.ended(error)
            self._end(entry, error)
        return has_encoded

    async def _next_epoch(self, *, keep: bool = False) -> None:
        self._in_flight.clear()
        self._adapters.close_epoch()
        if self._images is not None:
            self._images.close_epoch()
        self._metrics.replayed(self._recovery.next_epoch(keep=keep))
        if not await self._epochs.open(self._wait_for_shards):
            self._recovery.forget_kv()

    async def _restore_adapters(self) -> None:
        """Load the adapters of a new epoch; raises ShardError."""
        if await self._adapters.restore():
            self._recovery.drop_ended()

    def _wait_for_shards(self, error: RouterError | None) -> None:
        """Expire waiting entries while no epoch is open; with an error all entries fail."""
        self._expire()
        if error is not None:
            self._fail_all(error)

    def _expire(self) -> None:
        expired = self._waiting.expired(time.monotonic()) if len(self._waiting) else []
        expired += self._adapters.expired()
        for entry in expired:
            self._end(entry, QueueExpired(retry_after_seconds=self.drain_seconds()))

    def _fail_all(self, error: RouterError) -> None:
        self._fail_admitted(error)
        while len(self._waiting):
            self._end(self._waiting.pop(), error)
        for entry in self._adapters.waiting():
            self._end(entry, error)
        for entry in () if self._relay is None else tuple(self._relay.entries.values()):
            self._end(entry, error)

    def _fail_admitted(self, error: RouterError) -> None:
        for entry in self._recovery.take_all():
            self._end(entry, error)

    def _on_close(self, entry: Entry) -> None:
        """Take the entry of a client that has left out of the queue at once, or out of the batch with the next step."""
        self._waiting.discard(entry)
        self._end(entry)
        self._wake.set()
