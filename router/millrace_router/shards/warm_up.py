"""The warm-up of the shards: what was asked of them, what came of it, and the same again of those started anew."""

from __future__ import annotations

from millrace_proto import generate_pb2 as pb
from millrace_router.shards.errors import ShardChanged
from millrace_router.shards.ranks import Ranks
from millrace_router.shards.wire import Capacity, ShardInfo


class WarmUp:
    """Shards that come back have to be as those were that were warmed up first. Every call may raise a ShardError."""

    def __init__(self, ranks: Ranks, *, silence_seconds: float) -> None:
        """Shards that come back have `silence_seconds` to say what they are."""
        self._ranks = ranks
        self._silence_seconds = silence_seconds
        self._request = pb.WarmupRequest()
        self._info: ShardInfo | None = None
        self._capacity: Capacity | None = None
        self._are_new = False
        """Whether they were started anew, and have not shown yet that they are as before."""

    @property
    def fields(self) -> dict[str, int]:
        """Fields of the request that shards were given."""
        return {field.name: value for field, value in self._request.ListFields()}

    async def info(self, *, timeout: float | None) -> ShardInfo:
        """What the shards say of the model, which is what they have to be from now on."""
        self._info = await self._ranks.info(timeout=timeout)
        return self._info

    async def run(self, request: pb.WarmupRequest) -> Capacity:
        """Have every rank do as `request` says: that is what they have to have room for from now on."""
        self._request = request
        self._capacity = await self._ranks.warm_up(request)
        return self._capacity

    async def restore(self) -> None:
        """Have all ranks, which have to be there, be as warm as they were; shards started anew have no KV cache yet.

        Raises ShardChanged, as often as it is called, where those are not as before.
        """
        # No rank may be kept waiting in a warm-up for another one that has not come back yet.
        is_warm = await self._ranks.health()
        if self._capacity is not None and (self._are_new or not is_warm):
            self._are_new = True
            await self._again(self._capacity)
            self._are_new = False

    async def _again(self, before: Capacity) -> None:
        """Have new shards make the room that there was.

        ShardChanged where they have other blocks or kernels, as when the compiled ones cannot be had any more, all of
        them or some.
        """
        # Ranks that differ may wait for each other in a warm-up.
        info = await self._ranks.info(timeout=self._silence_seconds)
        request = pb.WarmupRequest(num_blocks=before.num_blocks)
        request.MergeFrom(self._request)
        if await self._ranks.warm_up(request) != before:
            raise ShardChanged("the shards came back with another KV capacity")
        known = self._info
        if known is None or not known.deterministic:
            return
        if _arithmetic(info) != _arithmetic(known):
            raise ShardChanged(f"the shards came back with {info.attention} attention")


def _arithmetic(info: ShardInfo) -> tuple[object, ...]:
    """What decides about an answer's last bits."""
    return (info.dtype, info.attention, info.block_size, info.deterministic)
