"""The one task that drives the shards: plan, send, await the oldest answer, deliver, drop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count

import structlog

from millrace_router.entry import Entry, TokenStream
from millrace_router.errors import GenerationError, NonFiniteOutput, RouterError, ShuttingDown
from millrace_router.metrics import Metrics
from millrace_router.planner import PlannerFactory, StepPlan
from millrace_router.request import ValidRequest
from millrace_router.shard_client import ShardedClient, ShardError
from millrace_router.tokenizer import Tokenizer
from millrace_router.waiting import WaitingQueue
from millrace_router.wire import StepResult

REOPEN_SECONDS = 0.5
UNREACHABLE_SECONDS = 60.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was sent and not answered."""

    number: int
    plan: StepPlan
    sent_at: float


class Batcher:
    """Continuous batching: entries join and leave the batch at every step.

    The task of `run` is the only writer of scheduling state. Up to `depth` steps are in flight, so the shards never
    wait for the router; what is learned one step late costs at most one discarded token. Whatever fails, every
    entry in flight gets its terminal event and the loop goes on in a new epoch.
    """

    def __init__(
        self,
        *,
        shards: ShardedClient,
        new_planner: PlannerFactory,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        metrics: Metrics,
        depth: int = 2,
    ) -> None:
        self._shards = shards
        self._new_planner = new_planner
        self._planner = new_planner()
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._depth = depth
        self._waiting = WaitingQueue()
        self._flights: deque[_Flight] = deque()
        self._last_answered = 0
        self._request_ids = count()
        self._wake = asyncio.Event()
        self._stopped = False

    def submit(self, request: ValidRequest) -> TokenStream:
        """Queue a request; its stream gets exactly one terminal event, whatever happens."""
        if self._stopped:
            raise ShuttingDown
        request_id = next(self._request_ids)
        entry = Entry(
            request_id,
            request,
            self._tokenizer,
            self._eos_token_ids,
            on_close=lambda: self._on_close(entry),
        )
        self._waiting.append(entry)
        self._metrics.queue_size.set(len(self._waiting))
        self._metrics.requests_waiting.set(len(self._waiting))
        self._wake.set()
        return entry.stream

    async def run(self) -> None:
        """Serve for ever; cancel to stop. Ends every stream before it returns."""
        try:
            await self._open()
            while True:
                try:
                    await self._turn()
                except ShardError as error:
                    await self._recover(str(error))
                except Exception as error:
                    # The loop has to outlive any defect in a step.
                    log.exception("step failed")
                    await self._recover(repr(error))
        finally:
            self._stopped = True
            self._fail_running("the server is shutting down")
            self._fail_waiting(ShuttingDown())

    async def _turn(self) -> None:
        """Keep the shards busy, then take one answer."""
        while len(self._flights) < self._depth:
            plan = self._planner.plan(
                self._waiting,
                last_sent=self._shards.last_sent,
                last_answered=self._last_answered,
            )
            if plan is None:
                break
            await self._send(plan)
        self._observe_batch()
        if self._flights:
            self._deliver(await self._shards.receive())
        else:
            self._wake.clear()
            await self._wake.wait()

    async def _send(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for row in plan.admitted:
            row.entry.stream.batched_at = now
        if plan.has_forward:
            self._metrics.batch_inference_count.labels(method=plan.method).inc()
        if plan.admitted:
            self._metrics.batch_next_size.observe(len(plan.admitted))
            if len(self._planner.rows) > len(plan.admitted):
                self._metrics.batch_concat.labels(reason="chunking").inc()
        self._flights.append(_Flight(self._shards.last_sent + 1, plan, now))
        await self._shards.send(plan)

    def _deliver(self, result: StepResult) -> None:
        """Hand a step's tokens to their streams; drop what has ended with them."""
        flight = self._flights.popleft()
        self._last_answered = result.number
        answered_at = time.monotonic()
        rows = self._planner.rows
        for slot, logprobs in result.prompt_logprobs:
            if slot in rows:
                rows[slot].entry.accept_prompt_logprobs(logprobs)
        for slot in result.failed_slots:
            if slot in rows:
                rows[slot].entry.stream.fail(NonFiniteOutput())
                self._planner.drop(rows[slot])
        skipped = Counter(count - 1 for slot, count in result.counts if slot in rows)
        for slot, token_id, logprob, top in result.tokens:
            # A row that has ended is not among `rows` any more, whatever else the step says of it.
            row = rows.get(slot)
            if row is not None and row.entry.accept(token_id, logprob, top):
                self._planner.drop(row)
        for num_tokens, times in skipped.items():
            self._metrics.request_skipped_tokens.observe(num_tokens, times=times)
        self._planner.answered(result.number)
        self._observe_step(flight, result, answered_at)

    async def _recover(self, message: str) -> None:
        """Fail what is in flight and begin a new epoch; what waits goes on waiting."""
        log.error("epoch failed", error=message)
        for method in {flight.plan.method for flight in self._flights if flight.plan.has_forward}:
            self._metrics.batch_inference_failure.labels(method=method).inc()
        self._fail_running(message)
        await self._open()

    def _fail_running(self, message: str) -> None:
        for row in self._planner.rows.values():
            row.entry.stream.fail(GenerationError(message))
        self._planner = self._new_planner()
        self._flights.clear()

    async def _open(self) -> None:
        """Begin an epoch, however long that takes; who waits longer than UNREACHABLE_SECONDS is told so."""
        self._last_answered = 0
        started_at = time.monotonic()
        while True:
            try:
                await self._shards.open()
            except ShardError as error:
                log.warning("cannot open a stream to the shards", error=str(error))
                if time.monotonic() - started_at > UNREACHABLE_SECONDS:
                    self._fail_waiting(GenerationError(str(error)))
                await asyncio.sleep(REOPEN_SECONDS)
            else:
                return

    def _fail_waiting(self, error: RouterError) -> None:
        while len(self._waiting):
            self._waiting.pop().stream.fail(error)

    def _on_close(self, entry: Entry) -> None:
        """A reader has left: a waiting entry goes at once, a running one with the next step."""
        if self._waiting.discard(entry):
            self._metrics.queue_size.set(len(self._waiting))
            self._metrics.requests_waiting.set(len(self._waiting))
        self._wake.set()

    def _observe_batch(self) -> None:
        metrics, planner = self._metrics, self._planner
        metrics.queue_size.set(len(self._waiting))
        metrics.requests_waiting.set(len(self._waiting))
        metrics.requests_running.set(len(planner.rows))
        metrics.batch_current_size.set(len(planner.rows))
        metrics.batch_current_max_tokens.set(
            planner.blocks.num_reserved * planner.blocks.block_size
        )
        metrics.kv_blocks_in_use.set(planner.blocks.num_in_use)

    def _observe_step(self, flight: _Flight, result: StepResult, answered_at: float) -> None:
        if not flight.plan.has_forward:
            return
        metrics, method, timings = self._metrics, flight.plan.method, result.timings
        metrics.batch_inference_success.labels(method=method).inc()
        metrics.batch_inference_duration.labels(method=method).observe(answered_at - flight.sent_at)
        metrics.batch_forward_duration.labels(method=method).observe(timings.forward)
        metrics.batch_decode_duration.labels(method=method).observe(timings.decode)
        metrics.batch_filter_duration.labels(method=method).observe(time.monotonic() - answered_at)
        if timings.concat is not None:
            metrics.batch_concat_duration.labels(method="decode").observe(timings.concat)
