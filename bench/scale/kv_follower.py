"""Follows what real routers have cached, by their KV-cache events, for a gateway of the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from bench.scale.cache_index import CacheIndex

if TYPE_CHECKING:
    import zmq.asyncio


def block_names(ids: Sequence[int], block_size: int) -> list[bytes]:
    """Names of the full blocks of a prompt, each of its tokens and all before them."""
    names, before = [], b""
    for end in range(block_size, len(ids) + 1, block_size):
        before = _name(before, ids[end - block_size : end])
        names.append(before)
    return names


def _name(before: bytes, ids: Sequence[int]) -> bytes:
    return blake2b(before + repr(tuple(ids)).encode(), digest_size=16).digest()


class Follower:
    """Keeps one router's blocks in an index, under the names that `block_names` gives."""

    def __init__(self, index: CacheIndex, replica: int, block_size: int) -> None:
        self._index = index
        self._bit = 1 << replica
        self._block_size = block_size
        self._names: dict[int, bytes] = {}
        """By the hash that the router's events give a block."""

    def apply(self, events: Iterable[Sequence[Any]]) -> None:
        """Follow the events of a batch."""
        for kind, *fields in events:
            match kind:
                case "BlockStored":
                    self._store(*fields[:3])
                case "BlockRemoved":
                    for one in fields[0]:
                        self._remove(one)
                case "AllBlocksCleared":
                    for one in list(self._names):
                        self._remove(one)

    def _store(self, hashes: Sequence[int], parent: int | None, ids: Sequence[int]) -> None:
        before = b"" if parent is None else self._names.get(parent)
        if before is None:
            # Its beginning was stored before this program listened.
            return
        names = [before]
        for place, one in enumerate(hashes):
            start = place * self._block_size
            names.append(_name(names[-1], ids[start : start + self._block_size]))
            self._names[one] = names[-1]
            self._index.add(names[-1], self._bit)

    def _remove(self, one: int) -> None:
        name = self._names.pop(one, None)
        if name is not None:
            self._index.remove(name, self._bit)


@asynccontextmanager
async def following(
    addresses: Sequence[str], index: CacheIndex, block_size: int
) -> AsyncIterator[None]:
    """Keep `index` up to date, for the length of the block, with the routers that publish at `addresses`."""
    # The extra may be absent.
    import zmq  # noqa: PLC0415
    import zmq.asyncio  # noqa: PLC0415

    context = zmq.asyncio.Context()
    tasks = []
    for replica, address in enumerate(addresses):
        socket = context.socket(zmq.SUB)
        socket.set_hwm(0)
        socket.subscribe(b"")
        socket.connect(address)
        follower = Follower(index, replica, block_size)
        tasks.append(asyncio.create_task(_follow(socket, follower)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


async def _follow(socket: zmq.asyncio.Socket, follower: Follower) -> None:
    import msgpack  # noqa: PLC0415

    while True:
        _, _, payload = await socket.recv_multipart()
        follower.apply(msgpack.unpackb(payload)[1])
