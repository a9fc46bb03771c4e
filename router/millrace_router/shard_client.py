"""The router's side of the wire: all ranks of a group, spoken to as if they were one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_router.entry import Entry
from millrace_router.journal.journal import Journal
from millrace_router.request import Grammar
from millrace_router.shard_stream import STREAM_ERRORS, ShardClient, from_grpc
from millrace_router.shard_stream import ShardChanged as ShardChanged
from millrace_router.shard_stream import ShardError as ShardError
from millrace_router.shard_stream import ShardHung as ShardHung
from millrace_router.shard_stream import ShardLost as ShardLost
from millrace_router.shard_stream import StepFailed as StepFailed
from millrace_router.step_plan import StepPlan
from millrace_router.wire import (
    Capacity,
    ShardInfo,
    StepResult,
    capacity_from_pb,
    grammar_to_pb,
    info_from_pb,
    open_to_pb,
    plan_to_pb,
    result_from_pb,
)

WATCH_SECONDS = 1.0
"""How often shards that warm up are asked for their health."""

T = TypeVar("T")


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
        self._shards = [ShardClient(address, tls) for address in addresses]
        self._epoch = 0
        self._number = 0
        self._batch_id = 0
        self._warmup = pb.WarmupRequest()
        self._info: ShardInfo | None = None
        self._capacity: Capacity | None = None
        self._are_new = False
        """Whether they were started anew, and have not shown yet that they are as before."""
        self._reading: asyncio.Task[list[pb.StepResponse]] | None = None
        """Of the oldest answer, where it was waited for with a limit."""
        self.journal: Journal | None = None
        """Told of every message and answer from the next epoch on."""

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
        return {field.name: value for field, value in self._warmup.ListFields()}

    async def info(self, *, timeout: float | None = None) -> ShardInfo:
        """Rank 0's view of the model.

        Raises:
            ShardError: unreachable, or the ranks are not one group.
            ShardChanged: they differ in what has to be the same on all of them.

        """
        self._info = await self._group_info(timeout)
        return self._info

    async def _group_info(self, timeout: float | None) -> ShardInfo:
        infos = await self._all(shard.info(timeout=timeout) for shard in self._shards)
        ranks = sorted(info.rank for info in infos)
        if ranks != list(range(len(infos))) or any(i.world_size != len(infos) for i in infos):
            raise ShardError(f"{len(infos)} shards given, but they are ranks {ranks}")
        by_rank = {info.rank: shard for info, shard in zip(infos, self._shards, strict=True)}
        self._shards = [by_rank[rank] for rank in ranks]
        first, *others = map(info_from_pb, sorted(infos, key=lambda info: info.rank))
        for rank, other in enumerate(others, start=1):
            if difference := other.difference(first):
                raise ShardChanged(f"rank {rank} differs from rank 0: {difference}")
        return first

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self._shards)

    async def health(self) -> bool:
        """Ask every rank, which answers while it computes; whether all have been warmed up.

        Raises:
            ShardLost: one is not there.
            ShardHung: one did not answer for `silence_seconds`.

        """
        timeout = self._silence_seconds
        states = await self._all(shard.health(timeout=timeout) for shard in self._shards)
        return all(state.warmed_up for state in states)

    async def compile_grammar(self, grammar: Grammar) -> str | None:
        """Why no sequence may have `grammar`, or None if one may. Raises ShardError."""
        request = pb.CompileGrammarRequest(grammar=grammar_to_pb(grammar))
        (answer,) = await self._all([self._shards[0].compile_grammar(request)])
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
        self._warmup = request
        self._capacity = await self._warm_up(request)
        return self._capacity

    async def open(self) -> None:
        """Begin a new epoch with an empty batch on every rank, which has to be there.

        Shards that were started anew have no KV cache yet, and are warmed up again. Raises ShardError; ShardChanged, as
        often as it is called, where those are not as before.
        """
        if self._epoch:
            await self.reset()
        # No rank may be kept waiting in a warm-up for another one that has not come back yet.
        is_warm = await self.health()
        if self._capacity is not None and (self._are_new or not is_warm):
            self._are_new = True
            await self._warm_up_again(self._capacity)
            self._are_new = False
        self._epoch = max(self._epoch + 1, time.time_ns())
        self._number = 0
        try:
            async with asyncio.timeout(self._silence_seconds):
                await self.write(open_to_pb(self._epoch))
                await self.read()
        except TimeoutError:
            raise ShardHung("a shard does not begin") from None

    async def send(self, plan: StepPlan[Entry]) -> int:
        """Send a step without waiting for its answer; its number."""
        self._number += 1
        self._batch_id += bool(plan.admitted)
        await self.write(
            plan_to_pb(plan, epoch=self._epoch, number=self._number, batch_id=self._batch_id)
        )
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
        if self.journal is not None:
            self.journal.sent(message)
        if len(self._shards) == 1:
            try:
                await self._shards[0].write(message)
            except STREAM_ERRORS as error:
                raise from_grpc(error) from error
        else:
            await self._all(shard.write(message) for shard in self._shards)

    async def read(self) -> list[pb.StepResponse]:
        """What every rank answers to the oldest message that has no answer yet."""
        if len(self._shards) == 1:
            try:
                answers = [await self._shards[0].read()]
            except STREAM_ERRORS as error:
                raise from_grpc(error) from error
        else:
            answers = await self._all(shard.read() for shard in self._shards)
            first = answers[0]
            if any((a.number, a.checksum) != (first.number, first.checksum) for a in answers):
                raise ShardError("the ranks of the group disagree about a step")
        if self.journal is not None:
            self.journal.answered(answers)
        return answers

    def failed(self, kind: str, error: ShardError) -> None:
        """Take note of why the epoch has ended."""
        if self.journal is not None:
            self.journal.failed(kind, str(error))

    async def reset(self) -> None:
        """Discard every stream and channel, with whatever is under way, and begin anew."""
        await self._stop_reading()
        for shard in self._shards:
            await shard.reset()

    async def _warm_up(self, request: pb.WarmupRequest) -> Capacity:
        """Warm all ranks up together; one that dies or stops meanwhile is noticed, however long it takes."""
        warming = asyncio.gather(*(shard.warmup(request) for shard in self._shards))
        watching = asyncio.create_task(self._watch())
        try:
            both: set[asyncio.Future[Any]] = {warming, watching}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not warming.done():
                watching.result()
            return capacity_from_pb(await warming)
        except STREAM_ERRORS as error:
            raise from_grpc(error) from error
        finally:
            watching.cancel()
            warming.cancel()
            await asyncio.gather(watching, warming, return_exceptions=True)

    async def _warm_up_again(self, before: Capacity) -> None:
        """Have new shards make the room that there was; raises ShardError.

        ShardChanged where they have other blocks or kernels, as when the compiled ones cannot be had any more, all of
        them or some.
        """
        # Ranks that differ may wait for each other in a warm-up.
        info = await self._group_info(self._silence_seconds)
        request = pb.WarmupRequest(num_blocks=before.num_blocks)
        request.MergeFrom(self._warmup)
        if await self._warm_up(request) != before:
            raise ShardChanged("the shards came back with another KV capacity")
        known = self._info
        if known is None or not known.deterministic:
            return
        if _arithmetic(info) != _arithmetic(known):
            raise ShardChanged(f"the shards came back with {info.attention} attention")

    async def _watch(self) -> None:
        """Ask for health until it fails."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.health()

    async def close(self) -> None:
        """End every stream and channel."""
        await self._stop_reading()
        for shard in self._shards:
            await shard.close()

    async def _stop_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        try:
            return list(await asyncio.gather(*calls))
        except STREAM_ERRORS as error:
            raise from_grpc(error) from error


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


def _arithmetic(info: ShardInfo) -> tuple[object, ...]:
    """What decides about an answer's last bits."""
    return (info.dtype, info.attention, info.block_size, info.deterministic)
