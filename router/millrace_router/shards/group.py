"""The shards of a tensor-parallel group: each call goes to all ranks at once, and their answers must agree."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_router.request.request import Grammar
from millrace_router.shards.channels import is_local
from millrace_router.shards.client import STREAM_ERRORS, ShardClient, from_grpc
from millrace_router.shards.errors import AdapterNotLoaded, ShardChanged, ShardError
from millrace_router.shards.wire import (
    Capacity,
    ShardInfo,
    capacity_from_pb,
    info_from_pb,
)

WATCH_SECONDS = 1.0
"""Period of the health checks during a warm-up."""
END_SECONDS = 2.0
"""Time for a rank to answer that it ends."""

T = TypeVar("T")


class ShardGroup:
    """The ranks of a model, in order of rank after the first `info`. Every call may raise a ShardError.

    The first `info` and `warm_up` define the group: restarted shards must have the same model and KV capacity.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tls: grpc.ChannelCredentials | None = None,
        *,
        silence_seconds: float = 30.0,
    ) -> None:
        """A rank that does not answer a health check for `silence_seconds` counts as hung."""
        self.silence_seconds = silence_seconds
        self._tls = tls
        self._shards = [ShardClient(address, tls) for address in addresses]
        self._moved: Sequence[str] | None = None
        """Where the ranks are from the next reset on."""
        self._warmup = pb.WarmupRequest()
        self._info: ShardInfo | None = None
        self._id: int | None = None
        """`InfoResponse.group` of the ranks at the last `Info` call."""
        self._capacity: Capacity | None = None
        self._was_restarted = False
        """Whether shards were restarted and not yet compared with the first warm-up."""

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this host, at Unix sockets."""
        return all(is_local(shard.address) for shard in self._shards)

    @property
    def warmup_fields(self) -> dict[str, int]:
        """The fields of the first WarmupRequest that were set."""
        return {field.name: value for field, value in self._warmup.ListFields()}

    async def info(self, *, timeout: float | None = None) -> ShardInfo:
        """Rank 0's description of the model.

        Raises:
            ShardError: a rank is unreachable, or the ranks are not one group.
            ShardChanged: the ranks differ in something that must be the same on all.

        """
        self._info = await self._ask_info(timeout)
        return self._info

    async def health(self) -> bool:
        """Return whether all ranks are warmed up. A rank answers while it computes.

        Raises:
            ShardLost: a rank is unreachable.
            ShardHung: a rank did not answer for `silence_seconds`.

        """
        timeout = self.silence_seconds
        states = await self._all(shard.health(timeout=timeout) for shard in self._shards)
        return all(state.warmed_up for state in states)

    async def end(self, reason: str) -> bool:
        """End every rank that belongs to the present group, as far as they can be reached; whether any does."""
        if self._id is None:
            return False
        calls = [shard.end(self._id, reason, timeout=END_SECONDS) for shard in self._shards]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return any(answer is True for answer in answers)

    async def compile_grammar(self, grammar: Grammar) -> str | None:
        """Have rank 0 compile `grammar`; the reason of a refusal, or None."""
        request = pb.CompileGrammarRequest(grammar=grammar.to_pb(pb.Grammar()))
        (answer,) = await self._all([self._shards[0].compile_grammar(request)])
        return answer.error if answer.HasField("error") else None

    async def load_adapter(self, epoch: int, slot: int, digest: str, *, timeout: float) -> None:
        """Have every rank read the adapter `digest` into `slot`; steps sent from then on may name it.

        Raises:
            AdapterNotLoaded: a rank cannot use it; others may have it.
            ShardBusy: a rank lacks memory for it.

        """
        request = pb.LoadAdapterRequest(epoch=epoch, slot=slot, digest=digest)
        answers = await self._each(
            shard.load_adapter(request, timeout=timeout) for shard in self._shards
        )
        for answer in answers:
            if answer.HasField("error"):
                raise AdapterNotLoaded(answer.error)

    async def unload_adapter(self, epoch: int, slot: int, *, timeout: float) -> None:
        """Have every rank free `slot`, which no sequence of its batch uses."""
        request = pb.UnloadAdapterRequest(epoch=epoch, slot=slot)
        await self._each(shard.unload_adapter(request, timeout=timeout) for shard in self._shards)

    async def warm_up(self, **fields: int | None) -> Capacity:
        """Have every rank allocate its KV cache and run the largest step; `fields` are WarmupRequest's."""
        values = {name: value for name, value in fields.items() if value is not None}
        self._warmup = pb.WarmupRequest(**values)
        self._capacity = await self._warm_up(self._warmup)
        return self._capacity

    async def restore(self) -> None:
        """Warm up restarted shards, so that they have the KV capacity of the first warm-up.

        Raises:
            ShardChanged: they have another capacity or other kernels, for example because the compiled kernels are
                missing on some ranks. Further calls raise it too.

        """
        # A rank must not wait in a warm-up for another rank that is still starting.
        is_warm = await self.health()
        if self._capacity is not None and (self._was_restarted or not is_warm):
            self._was_restarted = True
            await self._warm_up_again(self._capacity)
            self._was_restarted = False

    async def write(self, message: pb.StepRequest) -> None:
        """Send the same message to every rank."""
        if len(self._shards) == 1:
            try:
                await self._shards[0].write(message)
            except STREAM_ERRORS as error:
                raise from_grpc(error) from error
        else:
            await self._all(shard.write(message) for shard in self._shards)

    async def read(self) -> list[pb.StepResponse]:
        """Return every rank's answer to the oldest unanswered message, in order of rank."""
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

    def move(self, addresses: Sequence[str]) -> None:
        """From the next reset on, the ranks are at `addresses`, as many as before."""
        self._moved = tuple(addresses)

    async def reset(self) -> None:
        """Replace every stream and channel."""
        if self._moved is not None:
            await self.close()
            self._shards = [ShardClient(address, self._tls) for address in self._moved]
            self._moved = None
            return
        for shard in self._shards:
            await shard.reset()

    async def close(self) -> None:
        """Close every stream and channel."""
        for shard in self._shards:
            await shard.close()

    async def _ask_info(self, timeout: float | None) -> ShardInfo:
        infos = await self._all(shard.info(timeout=timeout) for shard in self._shards)
        ranks = sorted(info.rank for info in infos)
        if ranks != list(range(len(infos))) or any(i.world_size != len(infos) for i in infos):
            size = infos[0].world_size
            raise ShardError(
                f"the addresses lead to ranks {ranks} of {size}; each rank of a group is given once"
            )
        if len({info.group for info in infos}) > 1:
            raise ShardError("the ranks belong to different groups")
        self._id = infos[0].group
        by_rank = {info.rank: shard for info, shard in zip(infos, self._shards, strict=True)}
        self._shards = [by_rank[rank] for rank in ranks]
        first, *others = map(info_from_pb, sorted(infos, key=lambda info: info.rank))
        for rank, other in enumerate(others, start=1):
            if difference := other.difference(first):
                raise ShardChanged(f"rank {rank} differs from rank 0: {difference}")
        return first.with_largest_slices(others)

    async def _warm_up(self, request: pb.WarmupRequest) -> Capacity:
        """Warm up all ranks at once; health checks detect a rank that is lost or hangs meanwhile."""
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

    async def _watch(self) -> None:
        """Check health until a check fails."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.health()

    async def _warm_up_again(self, capacity: Capacity) -> None:
        # Ranks with different kernels may wait for each other in a warm-up, so this call comes first.
        info = await self._ask_info(self.silence_seconds)
        request = pb.WarmupRequest(num_blocks=capacity.num_blocks)
        if self._warmup.max_adapters:
            request.adapter_pages = capacity.adapter_pages
        request.MergeFrom(self._warmup)
        if await self._warm_up(request) != capacity:
            raise ShardChanged("the shards came back with another KV capacity")
        first = self._info
        if first is None or not first.deterministic:
            return
        if info.arithmetic != first.arithmetic:
            raise ShardChanged(
                f"the shards came back with {info.attention} attention over KV in {info.kv_cache_dtype}"
            )

    async def _each(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """As `_all`, but no call runs any more when one has failed."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        if isinstance(failed, STREAM_ERRORS):
            raise from_grpc(failed) from failed
        if failed is not None:
            raise failed
        return [result for result in results if not isinstance(result, BaseException)]

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        try:
            return list(await asyncio.gather(*calls))
        except STREAM_ERRORS as error:
            raise from_grpc(error) from error
