"""The replicas of a cell that have a block, as KV-cache events tell a gateway."""

from __future__ import annotations

from collections.abc import Iterable

from millrace_router.scheduler.prefix_cache import CachedBlock, PrefixCache


class CacheIndex:
    """Sets of replicas by block, as bits. Only blocks that several requests may have are in it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    def add(self, key: bytes, bit: int) -> None:
        """Register that the replica of `bit` has the block `key`."""
        self._holders[key] = self._holders.get(key, 0) | bit

    def remove(self, key: bytes, bit: int) -> None:
        """Register that it has dropped the block."""
        left = self._holders.get(key, 0) & ~bit
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)

    def num_held(self, keys: Iterable[bytes], num_replicas: int) -> list[int]:
        """Count the blocks at the beginning of the chain `keys` that each replica has."""
        held, mask = [0] * num_replicas, (1 << num_replicas) - 1
        count = 0
        for key in keys:
            found = mask & self._holders.get(key, 0)
            if found != mask:
                _fill(held, mask & ~found, count)
                mask = found
                if not mask:
                    return held
            count += 1
        _fill(held, mask, count)
        return held


def _fill(held: list[int], mask: int, count: int) -> None:
    while mask and count:
        low = mask & -mask
        held[low.bit_length() - 1] = count
        mask ^= low


class IndexedCache(PrefixCache):
    """A replica's prefix cache that keeps the cell's index up to date."""

    def __init__(self, index: CacheIndex, replica: int) -> None:
        super().__init__()
        self._index = index
        self._bit = 1 << replica

    def enter(self, key: bytes, block: int) -> CachedBlock | None:
        """Make a computed block findable, here and by gateways."""
        cached = super().enter(key, block)
        if cached is not None and _is_shared(key):
            self._index.add(key, self._bit)
        return cached

    def give_up(self, key: bytes) -> int | None:
        """Drop an idle block, which is computed again; it is entered next."""
        block = super().give_up(key)
        if block is not None and _is_shared(key):
            self._index.remove(key, self._bit)
        return block

    def evict(self) -> int:
        """Drop the least recently used idle block."""
        key = next(iter(self._idle), b"")
        block = super().evict()
        if _is_shared(key):
            self._index.remove(key, self._bit)
        return block

    def lose_all(self) -> None:
        """Take every block out of the index: the replica has failed."""
        for key in self._blocks:
            self._index.remove(key, self._bit)


def _is_shared(key: bytes) -> bool:
    """Whether the block may be another request's, too: see `PrefixNames`."""
    return b"/" in key
