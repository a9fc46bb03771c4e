"""The router's side of the wire: one client per shard, and one that speaks to all ranks as if they were one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.entry import Entry
from millrace_router.step_plan import StepPlan
from millrace_router.wire import (
    Capacity,
    ShardInfo,
    StepResult,
    capacity_from_pb,
    info_from_pb,
    open_to_pb,
    plan_to_pb,
    result_from_pb,
)

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
STUCK_SECONDS = 120
"""Longer than any step should take, and than the time-out of a group's collectives."""
STREAM_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)

T = TypeVar("T")
StepCall = grpc.aio.StreamStreamCall[pb.StepRequest, pb.StepResponse]


class ShardError(Exception):
    """A shard failed, refused a step or cannot be reached; everything in flight has failed with it."""


class ShardClient:
    """One shard: unary control calls, and the stream of numbered steps."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._connect()

    def _connect(self) -> None:
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._stub: pb_grpc.ShardServiceAsyncStub = pb_grpc.ShardServiceStub(self._channel)
        self._steps: StepCall | None = None

    async def info(self, *, timeout: float | None = None) -> pb.InfoResponse:
        """What the shard has loaded; waits for it to listen."""
        return await self._stub.Info(pb.InfoRequest(), wait_for_ready=True, timeout=timeout)

    async def health(self, *, timeout: float) -> pb.HealthResponse:
        """How far the engine has come."""
        return await self._stub.Health(pb.HealthRequest(), timeout=timeout)

    async def warmup(self, request: pb.WarmupRequest) -> pb.WarmupResponse:
        """Allocate the KV cache and run the largest step."""
        return await self._stub.Warmup(request)

    async def write(self, message: pb.StepRequest) -> None:
        """Send a step; the first one opens the stream."""
        if self._steps is None:
            self._steps = self._stub.Steps()
        await self._steps.write(message)

    async def read(self) -> pb.StepResponse:
        """The oldest answer that has not been read.

        Raises:
            ShardError: the step failed, or the stream has ended.

        """
        if self._steps is None:
            raise ShardError(f"no step was sent to {self.address}")
        answer = await self._steps.read()
        if not isinstance(answer, pb.StepResponse):
            raise ShardError(f"shard {self.address} ended its stream of steps")
        if answer.HasField("error"):
            raise ShardError(answer.error.message)
        return answer

    async def reset(self) -> None:
        """Discard stream and channel: an old channel reconnects late, a fresh one at once."""
        await self._channel.close()
        self._connect()

    async def close(self) -> None:
        """End stream and channel."""
        await self._channel.close()


class ShardedClient:
    """All ranks of a tensor-parallel group. Every rank gets every step; rank 0's tokens count.

    Steps may be sent ahead of answers; answers come in order. Any `ShardError` ends the epoch.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._shards = [ShardClient(address) for address in addresses]
        self._epoch = 0
        self._number = 0
        self._batch_id = 0
        self._warmup: pb.WarmupRequest | None = None
        self._capacity: Capacity | None = None

    @property
    def last_sent(self) -> int:
        """Number of the last step sent in this epoch."""
        return self._number

    async def info(self, *, timeout: float | None = None) -> ShardInfo:
        """Rank 0's view of the model.

        Raises:
            ShardError: unreachable, or the ranks are not one group.

        """
        infos = await self._all(shard.info(timeout=timeout) for shard in self._shards)
        ranks = sorted(info.rank for info in infos)
        if ranks != list(range(len(infos))) or any(i.world_size != len(infos) for i in infos):
            raise ShardError(f"{len(infos)} shards given, but they are ranks {ranks}")
        by_rank = {info.rank: shard for info, shard in zip(infos, self._shards, strict=True)}
        self._shards = [by_rank[rank] for rank in ranks]
        return info_from_pb(min(infos, key=lambda info: info.rank))

    async def health(self, *, timeout: float = 5.0) -> None:
        """Ask every rank; raises ShardError unless all answer and none sits on a step."""
        for state in await self._all(shard.health(timeout=timeout) for shard in self._shards):
            if state.pending_steps and state.idle_ns > STUCK_SECONDS * 1e9:
                raise ShardError(f"no step has ended for {state.idle_ns / 1e9:.0f} s")

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
        request = pb.WarmupRequest(
            max_batch_prefill_tokens=max_batch_prefill_tokens,
            max_batch_size=max_batch_size,
            max_concurrent_requests=max_concurrent_requests,
            max_input_tokens=max_input_tokens,
            max_total_tokens=max_total_tokens,
            max_batch_total_tokens=max_batch_total_tokens,
        )
        self._warmup = request
        self._capacity = await self._warm_up(request)
        return self._capacity

    async def open(self) -> None:
        """Begin a new epoch with an empty batch on every rank.

        Shards that were started anew have no KV cache yet, and are warmed up again.
        """
        try:
            await self._open()
        except ShardError:
            if self._warmup is None:
                raise
            if await self._warm_up(self._warmup) != self._capacity:
                raise ShardError("the shards came back with another KV capacity") from None
            await self._open()

    async def _warm_up(self, request: pb.WarmupRequest) -> Capacity:
        return capacity_from_pb(await self._all(shard.warmup(request) for shard in self._shards))

    async def _open(self) -> None:
        if self._epoch:
            for shard in self._shards:
                await shard.reset()
        self._epoch = max(self._epoch + 1, time.time_ns())
        self._number = 0
        await self._all(shard.write(open_to_pb(self._epoch)) for shard in self._shards)
        await self._answers()

    async def send(self, plan: StepPlan[Entry]) -> int:
        """Send a step without waiting for its answer; its number."""
        self._number += 1
        self._batch_id += bool(plan.admitted)
        message = plan_to_pb(plan, epoch=self._epoch, number=self._number, batch_id=self._batch_id)
        if len(self._shards) == 1:
            try:
                await self._shards[0].write(message)
            except STREAM_ERRORS as error:
                raise ShardError(describe(error)) from error
        else:
            await self._all(shard.write(message) for shard in self._shards)
        return self._number

    async def receive(self) -> StepResult:
        """The answer to the oldest step that has none yet."""
        return result_from_pb(await self._answers())

    async def close(self) -> None:
        """End every stream and channel."""
        for shard in self._shards:
            await shard.close()

    async def _answers(self) -> list[pb.StepResponse]:
        if len(self._shards) == 1:
            try:
                return [await self._shards[0].read()]
            except STREAM_ERRORS as error:
                raise ShardError(describe(error)) from error
        answers = await self._all(shard.read() for shard in self._shards)
        first = answers[0]
        if any((a.number, a.checksum) != (first.number, first.checksum) for a in answers):
            raise ShardError("the ranks of the group disagree about a step")
        return answers

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        try:
            return list(await asyncio.gather(*calls))
        except STREAM_ERRORS as error:
            raise ShardError(describe(error)) from error


def describe(error: BaseException) -> str:
    """What a client may be told of a failed call."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return "the stream to the shard has ended"
