"""The router's side of the wire: one client per shard, and one that speaks to all ranks as if they were one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.channels import open_channel
from millrace_router.entry import Entry
from millrace_router.request import Grammar
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
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
STREAM_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)

T = TypeVar("T")
StepCall = grpc.aio.StreamStreamCall[pb.StepRequest, pb.StepResponse]


class ShardError(Exception):
    """A call to the shards failed; if it was a step, everything in flight has failed with it."""


class StepFailed(ShardError):  # noqa: N818
    """The shards are there, but a step raised or was refused."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class ShardLost(ShardError):  # noqa: N818
    """A shard is not there, or has gone."""


class ShardHung(ShardError):  # noqa: N818
    """A shard is there, and does nothing."""


class ShardClient:
    """One shard: unary control calls, and the stream of numbered steps."""

    def __init__(self, address: str, tls: grpc.ChannelCredentials | None = None) -> None:
        self.address = address
        self._tls = tls
        self._connect()

    def _connect(self) -> None:
        self._channel = open_channel(self.address, self._tls)
        self._stub: pb_grpc.ShardServiceAsyncStub = pb_grpc.ShardServiceStub(self._channel)
        self._steps: StepCall | None = None

    async def info(self, *, timeout: float | None = None) -> pb.InfoResponse:
        """What the shard has loaded; waits for it to listen."""
        return await self._stub.Info(pb.InfoRequest(), wait_for_ready=True, timeout=timeout)

    async def health(self, *, timeout: float) -> pb.HealthResponse:
        """How far the engine has come."""
        return await self._stub.Health(pb.HealthRequest(), timeout=timeout)

    async def compile_grammar(self, request: pb.CompileGrammarRequest) -> pb.CompileGrammarResponse:
        """Whether a sequence may have a grammar; waits for the shard to listen."""
        return await self._stub.CompileGrammar(request, wait_for_ready=True)

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
            StepFailed: it says that the step failed.
            ShardLost: the stream has ended.

        """
        if self._steps is None:
            raise ShardLost(f"no step was sent to {self.address}")
        answer = await self._steps.read()
        if not isinstance(answer, pb.StepResponse):
            raise ShardLost(f"shard {self.address} ended its stream of steps")
        if answer.HasField("error"):
            kind = answer.error.kind
            raise StepFailed(
                answer.error.message, out_of_memory=kind == pb.StepError.KIND_OUT_OF_MEMORY
            )
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
        """Begin a new epoch with an empty batch on every rank, which has to be there.

        Shards that were started anew have no KV cache yet, and are warmed up again. Raises ShardError.
        """
        if self._epoch:
            await self.reset()
        # No rank may be kept waiting in a warm-up for another one that has not come back yet.
        if not await self.health() and self._capacity is not None:
            await self._warm_up_again(self._capacity)
        self._epoch = max(self._epoch + 1, time.time_ns())
        self._number = 0
        try:
            async with asyncio.timeout(self._silence_seconds):
                await self._all(shard.write(open_to_pb(self._epoch)) for shard in self._shards)
                await self._answers()
        except TimeoutError:
            raise ShardHung("a shard does not begin") from None

    async def send(self, plan: StepPlan[Entry]) -> int:
        """Send a step without waiting for its answer; its number."""
        self._number += 1
        self._batch_id += bool(plan.admitted)
        message = plan_to_pb(plan, epoch=self._epoch, number=self._number, batch_id=self._batch_id)
        if len(self._shards) == 1:
            try:
                await self._shards[0].write(message)
            except STREAM_ERRORS as error:
                raise from_grpc(error) from error
        else:
            await self._all(shard.write(message) for shard in self._shards)
        return self._number

    async def receive(self) -> StepResult:
        """The answer to the oldest step that has none yet."""
        return result_from_pb(await self._answers())

    async def reset(self) -> None:
        """Discard every stream and channel, with whatever is under way, and begin anew."""
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
        """Have shards that were started anew make the room that there was; raises ShardError."""
        request = pb.WarmupRequest(num_blocks=before.num_blocks)
        request.MergeFrom(self._warmup)
        if await self._warm_up(request) != before:
            raise ShardError("the shards came back with another KV capacity")

    async def _watch(self) -> None:
        """Ask for health until it fails."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.health()

    async def close(self) -> None:
        """End every stream and channel."""
        for shard in self._shards:
            await shard.close()

    async def _answers(self) -> list[pb.StepResponse]:
        if len(self._shards) == 1:
            try:
                return [await self._shards[0].read()]
            except STREAM_ERRORS as error:
                raise from_grpc(error) from error
        answers = await self._all(shard.read() for shard in self._shards)
        first = answers[0]
        if any((a.number, a.checksum) != (first.number, first.checksum) for a in answers):
            raise ShardError("the ranks of the group disagree about a step")
        return answers

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        try:
            return list(await asyncio.gather(*calls))
        except STREAM_ERRORS as error:
            raise from_grpc(error) from error


def from_grpc(error: BaseException) -> ShardError:
    """What a failed call means; its message may be told to clients."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return ShardLost("the stream to the shard has ended")
    code, message = error.code(), error.details() or error.code().name
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ShardHung("a shard does not answer")
    # A connection that breaks may be reported as "Stream removed", of the same code as an exception in a servicer.
    if code in GONE or (code == grpc.StatusCode.UNKNOWN and "xception" not in message):
        return ShardLost(message)
    return ShardError(message)
