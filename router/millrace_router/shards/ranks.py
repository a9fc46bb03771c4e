"""All ranks of a tensor-parallel group, each called at once, and what they have to agree on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_router.shards.client import STREAM_ERRORS, ShardClient, from_grpc
from millrace_router.shards.errors import ShardChanged, ShardError
from millrace_router.shards.wire import Capacity, ShardInfo, capacity_from_pb, info_from_pb

WATCH_SECONDS = 1.0
"""How often shards that warm up are asked for their health."""

T = TypeVar("T")


class Ranks:
    """In order of rank once they have been asked for it by `info`. Every call may raise a ShardError."""

    def __init__(
        self,
        addresses: Sequence[str],
        tls: grpc.ChannelCredentials | None,
        *,
        silence_seconds: float,
    ) -> None:
        """A rank that does not answer for `silence_seconds` while nothing is computed counts as hung."""
        self._silence_seconds = silence_seconds
        self._shards = [ShardClient(address, tls) for address in addresses]

    def __len__(self) -> int:
        return len(self._shards)

    async def info(self, *, timeout: float | None) -> ShardInfo:
        """What rank 0 says of the model, and all others with it.

        Raises:
            ShardError: unreachable, or the ranks are not one group.
            ShardChanged: they differ in what has to be the same on all of them.

        """
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

    async def health(self) -> bool:
        """Ask every rank, which answers while it computes; whether all have been warmed up.

        Raises:
            ShardLost: one is not there.
            ShardHung: one did not answer for `silence_seconds`.

        """
        timeout = self._silence_seconds
        states = await self._all(shard.health(timeout=timeout) for shard in self._shards)
        return all(state.warmed_up for state in states)

    async def compile_grammar(self, request: pb.CompileGrammarRequest) -> pb.CompileGrammarResponse:
        """What rank 0 says of a grammar."""
        (answer,) = await self._all([self._shards[0].compile_grammar(request)])
        return answer

    async def warm_up(self, request: pb.WarmupRequest) -> Capacity:
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

    async def write(self, message: pb.StepRequest) -> None:
        """Send every rank the same message."""
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
                return [await self._shards[0].read()]
            except STREAM_ERRORS as error:
                raise from_grpc(error) from error
        answers = await self._all(shard.read() for shard in self._shards)
        first = answers[0]
        if any((a.number, a.checksum) != (first.number, first.checksum) for a in answers):
            raise ShardError("the ranks of the group disagree about a step")
        return answers

    async def reset(self) -> None:
        """Discard every stream and channel."""
        for shard in self._shards:
            await shard.reset()

    async def close(self) -> None:
        """End every stream and channel."""
        for shard in self._shards:
            await shard.close()

    async def _watch(self) -> None:
        """Ask for health until it fails."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.health()

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        try:
            return list(await asyncio.gather(*calls))
        except STREAM_ERRORS as error:
            raise from_grpc(error) from error
