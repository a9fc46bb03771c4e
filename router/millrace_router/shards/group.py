"""The router's side of the wire: epochs of numbered steps, for all ranks of a group as if they were one shard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_router.request.request import Grammar
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.errors import ShardError, ShardHung
from millrace_router.shards.ranks import Ranks
from millrace_router.shards.warm_up import WarmUp
from millrace_router.shards.wire import (
    Capacity,
    ShardInfo,
    StepResult,
    grammar_to_pb,
    open_to_pb,
    plan_to_pb,
    result_from_pb,
)


class StepObserver(Protocol):
    """Sees every message to the shards and every answer; the journal is one. No method raises."""

    def sent(self, message: pb.StepRequest) -> None:
        """A message leaves for the shards."""

    def answered(self, answers: Sequence[pb.StepResponse]) -> None:
        """The ranks, in their order, have answered the oldest message without an answer."""

    def failed(self, kind: str, reason: str) -> None:
        """The epoch has ended early."""


class ShardedClient:
    """All ranks of a tensor-parallel group. Every rank gets every step; rank 0's tokens count.

    Steps may be sent ahead of answers; answers come in order. Any `ShardError` ends the epoch.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tls: grpc.ChannelCredentials | None = None,
        *,
        silence_seconds: float = 30.0,
    ) -> None:
        """A rank that does not answer for `silence_seconds` while nothing is computed counts as hung."""
        self._silence_seconds = silence_seconds
        self._ranks = Ranks(addresses, tls, silence_seconds=silence_seconds)
        self._warm_up = WarmUp(self._ranks, silence_seconds=silence_seconds)
        self._epoch = 0
        self._number = 0
        self._reading: asyncio.Task[list[pb.StepResponse]] | None = None
        """Of the oldest answer, where it was waited for with a limit."""
        self.observer: StepObserver | None = None
        """Sees every message and answer from the next epoch on."""

    @property
    def epoch(self) -> int:
        """The current epoch; 0 before the first."""
        return self._epoch

    @property
    def last_sent(self) -> int:
        """Number of the last step sent in this epoch."""
        return self._number

    @property
    def warmup_fields(self) -> dict[str, int]:
        """Fields of the WarmupRequest that shards were given."""
        return self._warm_up.fields

    async def info(self, *, timeout: float | None = None) -> ShardInfo:
        """Rank 0's view of the model.

        Raises:
            ShardError: unreachable, or the ranks are not one group.
            ShardChanged: they differ in what has to be the same on all of them.

        """
        return await self._warm_up.info(timeout=timeout)

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self._ranks)

    async def health(self) -> bool:
        """Ask every rank, which answers while it computes; whether all have been warmed up.

        Raises:
            ShardLost: one is not there.
            ShardHung: one did not answer for `silence_seconds`.

        """
        return await self._ranks.health()

    async def compile_grammar(self, grammar: Grammar) -> str | None:
        """Why no sequence may have `grammar`, or None if one may. Raises ShardError."""
        request = pb.CompileGrammarRequest(grammar=grammar_to_pb(grammar))
        answer = await self._ranks.compile_grammar(request)
        return answer.error if answer.HasField("error") else None

    async def warmup(
        self,
        *,
        max_batch_prefill_tokens: int,
        max_batch_size: int,
        max_concurrent_requests: int,
        max_input_tokens: int | None,
        max_total_tokens: int | None,
        max_batch_total_tokens: int | None,
    ) -> Capacity:
        """Have every rank allocate its KV cache and run the largest step once."""
        return await self.warm_up(
            pb.WarmupRequest(
                max_batch_prefill_tokens=max_batch_prefill_tokens,
                max_batch_size=max_batch_size,
                max_concurrent_requests=max_concurrent_requests,
                max_input_tokens=max_input_tokens,
                max_total_tokens=max_total_tokens,
                max_batch_total_tokens=max_batch_total_tokens,
            )
        )

    async def warm_up(self, request: pb.WarmupRequest) -> Capacity:
        """Have every rank do as `request` says; raises ShardError."""
        return await self._warm_up.run(request)

    async def open(self) -> None:
        """Begin a new epoch with an empty batch on every rank, which has to be there.

        Shards that were started anew have no KV cache yet, and are warmed up again. Raises ShardError; ShardChanged, as
        often as it is called, where those are not as before.
        """
        if self._epoch:
            await self.reset()
        await self._warm_up.restore()
        self._epoch = max(self._epoch + 1, time.time_ns())
        self._number = 0
        try:
            async with asyncio.timeout(self._silence_seconds):
                await self.write(open_to_pb(self._epoch))
                await self.read()
        except TimeoutError:
            raise ShardHung("a shard does not begin") from None

    async def send(self, plan: StepPlan) -> int:
        """Send a step without waiting for its answer; its number."""
        self._number += 1
        await self.write(plan_to_pb(plan, epoch=self._epoch, number=self._number))
        return self._number

    async def answers_within(self, seconds: float) -> bool:
        """Wait so long, or until the oldest step is answered; whether it is. If it failed, `receive` says so."""
        # A call that is cancelled ends the stream, so no timeout may cancel it.
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.create_task(self.read())
        await _done_within(reading, seconds)
        return reading.done()

    async def receive(self) -> StepResult:
        """The answer to the oldest step that has none yet."""
        reading, self._reading = self._reading, None
        return result_from_pb(await (reading or self.read()))

    async def write(self, message: pb.StepRequest) -> None:
        """Send a message to every rank as it is."""
        if self.observer is not None:
            self.observer.sent(message)
        await self._ranks.write(message)

    async def read(self) -> list[pb.StepResponse]:
        """What every rank answers to the oldest message that has no answer yet."""
        answers = await self._ranks.read()
        if self.observer is not None:
            self.observer.answered(answers)
        return answers

    def failed(self, kind: str, error: ShardError) -> None:
        """Take note of why the epoch has ended."""
        if self.observer is not None:
            self.observer.failed(kind, str(error))

    async def reset(self) -> None:
        """Discard every stream and channel, with whatever is under way, and begin anew."""
        await self._stop_reading()
        await self._ranks.reset()

    async def close(self) -> None:
        """End every stream and channel."""
        await self._stop_reading()
        await self._ranks.close()

    async def _stop_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()


async def _done_within(task: asyncio.Task[Any], seconds: float) -> None:
    """Wait so long, or until `task` is done. Runs in every step; `asyncio.wait` takes three times the calls."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(seconds, wake)
    task.add_done_callback(wake)
    try:
        await waiter
    finally:
        timer.cancel()
        task.remove_done_callback(wake)
