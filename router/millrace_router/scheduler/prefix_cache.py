"""Computed KV blocks by what they hold, shared by reference count and evicted least recently used, leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class CachedBlock:
    """A block whose KV is computed and will not change."""

    __slots__ = ("block", "forgotten", "key", "num_pins")

    def __init__(self, key: bytes, block: int) -> None:
        self.key = key
        self.block = block
        self.num_pins = 0
        """Sequences that hold it."""
        self.forgotten = False


class PrefixCache:
    """Index from block keys to computed blocks.

    A sequence pins whole chains from the root on and unpins them from their end. So a block is never idle while one
    after it is pinned, and the order in which blocks became idle is already leaves before parents.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, CachedBlock] = {}
        self._idle: OrderedDict[bytes, CachedBlock] = OrderedDict()
        self._expected: dict[bytes, int] = {}

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence holds: kept for a later hit, or to be evicted."""
        return len(self._idle)

    def find(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """Return the cached blocks of the longest known beginning of the chain `keys`."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def pin(self, blocks: Iterable[CachedBlock]) -> None:
        """Keep `blocks`, a chain from the root on, from eviction."""
        for block in blocks:
            if not block.num_pins:
                self._idle.pop(block.key, None)
            block.num_pins += 1

    def unpin(self, blocks: Sequence[CachedBlock]) -> list[int]:
        """Let a pinned chain go; returns the blocks that are free now, because they were forgotten."""
        freed = []
        for block in reversed(blocks):
            block.num_pins -= 1
            if block.num_pins:
                continue
            if block.forgotten:
                freed.append(block.block)
            else:
                self._idle[block.key] = block
        return freed

    def enter(self, key: bytes, block: int) -> CachedBlock | None:
        """Make a computed block findable, and pin it; None if another one of this key is findable."""
        if key in self._blocks:
            return None
        cached = self._blocks[key] = CachedBlock(key, block)
        cached.num_pins = 1
        return cached

    def give_up(self, key: bytes) -> int | None:
        """Drop the block of this key, and return it, if it is idle."""
        cached = self._idle.pop(key, None)
        if cached is None:
            return None
        del self._blocks[key]
        return cached.block

    def evict(self) -> int:
        """Drop the least recently used idle block and return it; raises KeyError if there is none."""
        key, cached = self._idle.popitem(last=False)
        del self._blocks[key]
        return cached.block

    def forget(self, cached: CachedBlock) -> None:
        """Make a pinned block unfindable; it is free once nobody holds it."""
        cached.forgotten = True
        if self._blocks.get(cached.key) is cached:
            del self._blocks[cached.key]

    def expect(self, keys: Iterable[bytes]) -> None:
        """Note that a sequence is going to compute `keys`."""
        expected = self._expected
        for key in keys:
            expected[key] = expected.get(key, 0) + 1

    def expects(self, key: bytes) -> bool:
        """Whether some sequence is going to compute `key`."""
        return key in self._expected

    def unexpect(self, keys: Iterable[bytes]) -> None:
        """Take back `expect`: they are computed, or their sequence is gone."""
        expected = self._expected
        for key in keys:
            num_left = expected.pop(key) - 1
            if num_left:
                expected[key] = num_left
