"""Records what enters and leaves the prefix cache, as vLLM's events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from millrace_router.request.block_hashes import ContentKey
from millrace_router.scheduler.prefix_cache import CachedBlock, PrefixCache

Event: TypeAlias = list[object]
"""An event as vLLM's array: its name, then its fields."""
Batch: TypeAlias = list[object]
"""Seconds since 1970, the events, and the rank in data parallelism."""
MEDIUM = "GPU"
"""vLLM's word for the memory that the model computes in; readers take others for a slower tier."""
RANK = 0


def block_hash(key: bytes) -> int:
    """Return the name of a block in events: the first 8 bytes of its key, big-endian."""
    return int.from_bytes(key[:8], "big")


class EventRecorder:
    """Collects the events of the caches that it makes, one cache an epoch, and hands them out in batches."""

    def __init__(self, block_size: int, clock: Callable[[], float] = time.time) -> None:
        """`block_size` is the number of positions in a block."""
        self._block_size = block_size
        self._clock = clock
        self._events: list[Event] = []
        self._stored_after: ContentKey | None = None
        """The last block of the last event, if that stored blocks."""
        self._cache: RecordedCache | None = None
        self.on_event: Callable[[], object] | None = None
        """Called with the first event after each `take`."""

    def new_cache(self) -> PrefixCache:
        """Make the empty cache of a new epoch; the blocks of the last one are removed by name, and all are cleared."""
        if self._cache is not None:
            for key in self._cache.published():
                self.removed(key)
        self._add(["AllBlocksCleared"])
        self._cache = RecordedCache(self)
        return self._cache

    def stored(self, key: ContentKey) -> None:
        """Record a block that can be found from now on."""
        last = self._stored_after
        if last is not None and key.parent == last:
            _, hashes, _, token_ids, *_, name = self._events[-1]
            if name == key.adapter:
                assert isinstance(hashes, list)
                assert isinstance(token_ids, list)
                hashes.append(block_hash(key))
                token_ids += key.token_ids
                self._stored_after = key
                return
        parent = None if key.parent is None else block_hash(key.parent)
        ids = list(key.token_ids)
        stored = [[block_hash(key)], parent, ids, self._block_size, None, MEDIUM, key.adapter]
        self._add(["BlockStored", *stored])
        self._stored_after = key

    def removed(self, key: bytes) -> None:
        """Record a block that can no longer be found."""
        if self._events and self._events[-1][0] == "BlockRemoved":
            hashes = self._events[-1][1]
            assert isinstance(hashes, list)
            hashes.append(block_hash(key))
        else:
            self._add(["BlockRemoved", [block_hash(key)], MEDIUM])

    def take(self) -> Batch | None:
        """Return the events since the last call; None if there are none."""
        if not self._events:
            return None
        events, self._events = self._events, []
        self._stored_after = None
        return [self._clock(), events, RANK]

    def _add(self, event: Event) -> None:
        is_first = not self._events
        self._events.append(event)
        self._stored_after = None
        if is_first and self.on_event is not None:
            self.on_event()


class RecordedCache(PrefixCache):
    """A prefix cache that records its changes. Blocks of requests with a salt are kept to themselves.

    A block is published while all blocks before it are: one that lost a block before it cannot be found either.
    """

    def __init__(self, recorder: EventRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._published: dict[bytes, ContentKey] = {}
        self._children: dict[bytes, dict[bytes, ContentKey]] = {}
        """Published blocks by the block before."""
        self._orphans: dict[bytes, dict[bytes, ContentKey]] = {}
        """Unpublished blocks by the block before, which is missing."""

    def published(self) -> Iterator[ContentKey]:
        """Yield the keys of the published blocks."""
        yield from self._published.values()

    def enter(self, key: bytes, block: int) -> CachedBlock | None:
        """Make a computed block findable, and record it."""
        cached = super().enter(key, block)
        if cached is not None and isinstance(key, ContentKey):
            if key.parent is None or key.parent in self._published:
                self._publish(key)
            else:
                self._orphans.setdefault(key.parent, {})[key] = key
        return cached

    def give_up(self, key: bytes) -> int | None:
        """Drop an idle block of this key, and record it."""
        cached = self._idle.get(key)
        block = super().give_up(key)
        if cached is not None:
            self._removed(cached.key)
        return block

    def evict(self) -> int:
        """Drop the least recently used idle block, and record it."""
        key = next(iter(self._idle), None)
        block = super().evict()
        if key is not None:
            self._removed(key)
        return block

    def forget(self, cached: CachedBlock) -> None:
        """Remove a pinned block from the index, and record it."""
        was_findable = self._blocks.get(cached.key) is cached
        super().forget(cached)
        if was_findable:
            self._removed(cached.key)

    def _publish(self, first: ContentKey) -> None:
        """Publish a block, and those after it that were missing it."""
        waiting = [first]
        while waiting:
            key = waiting.pop()
            self._published[key] = key
            if key.parent is not None:
                self._children.setdefault(key.parent, {})[key] = key
            self._recorder.stored(key)
            waiting += self._orphans.pop(key, {}).values()

    def _removed(self, key: bytes) -> None:
        if not isinstance(key, ContentKey):
            return
        if key not in self._published:
            _discard(self._orphans, key)
            return
        gone = [key]
        for one in gone:
            after = self._children.pop(one, {})
            if after:
                self._orphans[one] = after
            gone += after.values()
        _discard(self._children, key)
        # Ends of chains first.
        for one in reversed(gone):
            del self._published[one]
            self._recorder.removed(one)


def _discard(families: dict[bytes, dict[bytes, ContentKey]], key: ContentKey) -> None:
    """Remove a block from those with the same block before."""
    if key.parent is None:
        return
    family = families.get(key.parent)
    if family is not None:
        family.pop(key, None)
        if not family:
            del families[key.parent]
