"""The shards of a tensor-parallel group: each call goes to all ranks at once, and their answers must agree."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_router.request.images import PreparedImage
from millrace_router.request.request import Grammar
from millrace_router.scheduler.block_ledger import StoredBlocks
from millrace_router.shards.channels import is_local
from millrace_router.shards.client import STREAM_ERRORS, ShardClient, from_grpc
from millrace_router.shards.errors import (
    AdapterNotLoaded,
    ImageRefused,
    ShardChanged,
    ShardError,
    ShardHung,
    ShardLost,
    StepFailed,
)
from millrace_router.shards.wire import (
    Capacity,
    ShardInfo,
    capacity_from_pb,
    image_to_pb,
    info_from_pb,
    stored_from_pb,
)

WATCH_SECONDS = 1.0
"""Period of the health checks during a warm-up."""
END_SECONDS = 2.0
"""Time for a rank to answer that it ends."""
LOSS_SECONDS = 0.1
"""Time for the loss of a rank to show, after a step failed on another one, which may have missed it."""
_CHECKS = 4
"""How often the ranks are asked whether they compute before they count as hung."""

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
        self._num_stores = 0

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this host, at Unix sockets."""
        return all(is_local(shard.address) for shard in self._shards)

    @property
    def has_kv_store(self) -> bool:
        """Whether every rank has a directory of its KV blocks, which outlive it."""
        return self._capacity is not None and self._capacity.has_kv_store

    @property
    def kv_stores(self) -> tuple[int, ...]:
        """A number for the KV memory of each rank, in order of rank.

        As long as they are equal, blocks hold what the last step wrote to them. They change with every warm-up, even
        one that fails half-way, and where ranks move.
        """
        return (self._num_stores,) * len(self._shards)

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
        return all(state.warmed_up for state in await self._states())

    async def stored_blocks(self) -> list[StoredBlocks]:
        """Return every rank's directory of KV blocks, in order of rank; empty where KV does not outlive a rank."""
        if not self.has_kv_store:
            return []
        # Shards that live finish the steps that they have received before.
        asking = self._all(shard.blocks() for shard in self._shards)
        answers = await self.while_computing(asking, "a shard does not report its blocks")
        return [stored_from_pb(answer) for answer in answers]

    async def pulse(self) -> int:
        """Return a number that differs from an earlier one if any rank has computed in between; raises as `health`."""
        # The ranks wait for each other in every layer, so that one which goes on shows that all do.
        return sum(state.pulse for state in await self._states())

    async def while_computing(self, call: Awaitable[T], silence: str) -> T:
        """Await `call`, which may wait for steps in flight, as long as the ranks compute.

        Raises ShardHung(`silence`) once they have computed nothing for `silence_seconds`, and then cancels `call`.
        """
        task = asyncio.ensure_future(call)
        pulse: int | None = None
        num_silent = 0
        try:
            while not (await asyncio.wait({task}, timeout=self.silence_seconds / _CHECKS))[0]:
                before, pulse = pulse, await self.pulse()
                num_silent = num_silent + 1 if before in (None, pulse) else 0
                if num_silent == _CHECKS and not task.done():
                    raise ShardHung(silence)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

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

    async def put_image(
        self, epoch: int, slot: int, first_row: int, image: PreparedImage, *, timeout: float
    ) -> None:
        """Have every rank hold the pixels of `image` in `slot`; `Encode` steps sent from then on may name it.

        Raises:
            ImageRefused: a rank does not take them.

        """
        answers = await self._each(
            shard.put_image(image_to_pb(epoch, slot, first_row, image), timeout=timeout)
            for shard in self._shards
        )
        for answer in answers:
            if answer.HasField("error"):
                raise ImageRefused(answer.error)

    async def warm_up(self, **fields: int | list[int] | None) -> Capacity:
        """Have every rank allocate its KV cache and run the largest step; `fields` are WarmupRequest's."""
        values = {name: value for name, value in fields.items() if value is not None}
        self._warmup = pb.WarmupRequest(**values)  # type: ignore[arg-type]
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
            self._num_stores += 1
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
        self._num_stores += 1
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
        request = pb.WarmupRequest()
        request.CopyFrom(self._warmup)
        request.num_blocks = capacity.num_blocks
        request.window_blocks[:] = [each.num_blocks for each in capacity.window_groups]
        if self._warmup.max_adapters:
            request.adapter_pages = capacity.adapter_pages
        if capacity.state_pages:
            request.state_pages = capacity.state_pages
        if capacity.feature_rows:
            request.feature_rows = capacity.feature_rows
        if await self._warm_up(request) != capacity:
            raise ShardChanged("the shards came back with another KV capacity")
        first = self._info
        if first is None or not first.deterministic:
            return
        if info.arithmetic != first.arithmetic:
            raise ShardChanged(
                f"the shards came back with {info.attention} attention over KV in {info.kv_cache_dtype}"
                f" and {info.quantize_activations or 'plain'} activations"
            )

    async def _each(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """As `_all`, but no call runs any more when one has failed."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        try:
            if isinstance(failed, STREAM_ERRORS):
                raise from_grpc(failed) from failed
            if failed is not None:
                raise failed
            return [result for result in results if not isinstance(result, BaseException)]
        finally:
            # An error has this frame, and they would keep each other, and the error's call its channel.
            del results, failed

    async def _states(self) -> list[pb.HealthResponse]:
        timeout = self.silence_seconds
        return await self._all(shard.health(timeout=timeout) for shard in self._shards)

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """The results of all calls; raises the first error, or the loss of a rank with which a step failed."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        except STREAM_ERRORS as error:
            raise from_grpc(error) from error
        except StepFailed as failed:
            for task in (await asyncio.wait(tasks, timeout=LOSS_SECONDS))[0]:
                other = None if task.cancelled() else task.exception()
                loss = from_grpc(other) if isinstance(other, STREAM_ERRORS) else other
                if isinstance(loss, ShardLost):
                    raise loss from failed
            raise
        finally:
            # As in `_each`.
            tasks.clear()
