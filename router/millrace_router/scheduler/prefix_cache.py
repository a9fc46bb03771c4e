"""Computed KV blocks by their content: reference counted, evicted least recently used, ends of chains first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class CachedBlock:
    """A block whose KV values are computed and final."""

    __slots__ = ("block", "forgotten", "key", "num_pins")

    def __init__(self, key: bytes, block: int) -> None:
        self.key = key
        self.block = block
        self.num_pins = 0
        """Sequences that hold it."""
        self.forgotten = False


class PrefixCache:
    """Index from block keys to computed blocks.

    A sequence pins a whole chain from its beginning, and unpins it from its end. So a block is never idle while a later
    block of its chain is pinned, and blocks become idle in the order from the ends of chains to their beginnings.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, CachedBlock] = {}
        self._idle: OrderedDict[bytes, CachedBlock] = OrderedDict()
        self._expected: dict[bytes, int] = {}

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence holds: kept for a later hit, or evicted."""
        return len(self._idle)

    def find(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """Return the cached blocks of the longest known beginning of the chain `keys`."""
        blocks = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def adopt(self, blocks: Mapping[int, bytes]) -> set[int]:
        """Take computed blocks, with their keys, as idle, the first to be evicted first; return those that are used."""
        for block, key in blocks.items():
            if key not in self._blocks:
                self._blocks[key] = self._idle[key] = CachedBlock(key, block)
        return {cached.block for cached in self._idle.values()}

    def keys_by_block(self) -> dict[int, bytes]:
        """Return the key of each block that can be found."""
        return {cached.block: key for key, cached in self._blocks.items()}

    def pin(self, blocks: Iterable[CachedBlock]) -> None:
        """Protect `blocks`, the beginning of a chain, from eviction."""
        for block in blocks:
            if not block.num_pins:
                self._idle.pop(block.key, None)
            block.num_pins += 1

    def unpin(self, blocks: Sequence[CachedBlock]) -> list[int]:
        """Release a pinned chain; return the blocks that are free now, because they were forgotten."""
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
        """Make a computed block findable, and pin it; None if the key has a block already."""
        if key in self._blocks:
            return None
        cached = self._blocks[key] = CachedBlock(key, block)
        cached.num_pins = 1
        return cached

    def give_up(self, key: bytes) -> int | None:
        """Drop the block of this key if it is idle, and return it."""
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
        """Remove a pinned block from the index; it is free once no sequence holds it."""
        cached.forgotten = True
        if self._blocks.get(cached.key) is cached:
            del self._blocks[cached.key]

    def expect(self, keys: Iterable[bytes]) -> None:
        """Register that a sequence is going to compute `keys`."""
        expected = self._expected
        for key in keys:
            expected[key] = expected.get(key, 0) + 1

    def expects(self, key: bytes) -> bool:
        """Return whether some sequence is going to compute `key`."""
        return key in self._expected

    def unexpect(self, keys: Iterable[bytes]) -> None:
        """Undo `expect`: the blocks are computed, or their sequence has ended."""
        expected = self._expected
        for key in keys:
            num_left = expected.pop(key) - 1
            if num_left:
                expected[key] = num_left
