"""Blocks of layers with an attention window, which are given back once no query can reach them any more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from millrace_router.scheduler.block_ledger import BlockLedger
from millrace_router.scheduler.prefix_cache import CachedBlock, PrefixCache

KEPT_EVERY = 16
"""A tail is kept in a long prompt after so many times its length, for the prompts that part from it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGroup:
    """Layers with one attention window, and the blocks of their KV."""

    num_blocks: int
    """The first one, which no sequence owns, included."""
    window: int
    """Positions that a query sees, its own included."""
    reach: int
    """Positions before a query's own that its attention may read, those that it masks included."""
    num_layers: int = 0
    bytes_per_token: int = 0
    """Bytes of a position on one rank."""


class WindowCache(PrefixCache):
    """Window blocks by the key of their content, each pinned by itself. Those that nothing kept are evicted first."""

    def __init__(self) -> None:
        super().__init__()
        self._passing: OrderedDict[bytes, CachedBlock] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._idle) + len(self._passing)

    @property
    def findable(self) -> Container[bytes]:
        """The keys of blocks that can be found."""
        return self._blocks

    def take(self, key: bytes) -> CachedBlock:
        """Return the block of this key, pinned; raises KeyError if there is none."""
        cached = self._blocks[key]
        self._passing.pop(key, None)
        self.pin([cached])
        return cached

    def leave(self, cached: CachedBlock, *, keeps: bool) -> list[int]:
        """Release a pinned block, which stays to be found, longer if `keeps`; return it if it is free now."""
        freed = self.unpin([cached])
        if not (keeps or cached.num_pins or freed):
            self._passing[cached.key] = self._idle.pop(cached.key)
        return freed

    def give_up(self, key: bytes) -> int | None:
        """Drop the block of this key if it is idle, and return it."""
        cached = self._passing.pop(key, None)
        if cached is None:
            return super().give_up(key)
        del self._blocks[key]
        return cached.block

    def evict(self) -> int:
        """Drop the least recently used idle block, one that nothing kept if there is one, and return it."""
        if not self._passing:
            return super().evict()
        key, cached = self._passing.popitem(last=False)
        del self._blocks[key]
        return cached.block


@dataclass(slots=True, eq=False)
class Held:
    """The end of a table: the blocks that a slot, or a parked request, still holds."""

    first: int = 0
    """How many blocks of the table are not held any more."""
    blocks: list[int] = field(default_factory=list)
    pins: list[CachedBlock | None] = field(default_factory=list)
    """Of each of the blocks, if it is in the cache."""
    promised: int = 0
    """Blocks that the slot may hold at any time."""
    ends: tuple[int, ...] = ()
    """Numbers of blocks: where the table may be shared, so that the tail before it is kept."""

    @property
    def end(self) -> int:
        """Blocks of the table."""
        return self.first + len(self.blocks)

    @property
    def reserved(self) -> int:
        """Blocks that no other slot can count on."""
        return max(self.promised, len(self.blocks))


class WindowBlocks:
    """Hands out the blocks of one window group, and takes each back once it is behind the window of its sequence.

    Every admitted slot is promised as many blocks as it needs to go on, so that no sequence is preempted for window
    blocks. More, for the chunk of a long prompt, it has only while they are left. A group's first number follows
    the last one of the group before, so that a number says to which group a block belongs.

    Invariant: free + cached + held = num_blocks; reserved blocks are at most as many.
    """

    def __init__(
        self,
        group: WindowGroup,
        block_size: int,
        *,
        first: int,
        caching: bool,
        ledger: BlockLedger | None = None,
        whole_tokens: int = 0,
    ) -> None:
        """`first` is the number of the group's first block, which is not handed out.

        `whole_tokens` of a prompt may have to be computed in one step.
        """
        self.group = group
        self.num_blocks = group.num_blocks - 1
        self.cache = WindowCache() if caching else None
        self._size = block_size
        self._reach = group.reach
        self._first = first
        self._ledger = ledger
        self._free: list[int] = []
        self._num_fresh = self.num_blocks
        self._held: dict[int, Held] = {}
        self._num_reserved = 0
        self._span = -(-(group.reach + whole_tokens) // block_size) + 2
        self._stride = KEPT_EVERY * (-(-group.reach // block_size) + 1)

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds, kept because another request may need their content."""
        return 0 if self.cache is None else self.cache.num_idle

    @property
    def num_free(self) -> int:
        return len(self._free) + self._num_fresh

    @property
    def num_owned(self) -> int:
        """Blocks that a sequence or a parked request holds."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that no sequence counts on."""
        return self.num_blocks - self._num_reserved

    def promise(self, num_tokens: int) -> int:
        """Return the blocks that a sequence of at most `num_tokens` positions needs at any time to go on."""
        return min(self._span, -(-num_tokens // self._size))

    def first_needed(self, position: int) -> int:
        """Return the first block of a table that a query at `position` may read."""
        return max(0, position - self._reach) // self._size

    def longest_hit(self, keys: Sequence[bytes], most: int) -> int:
        """Return the largest number of blocks, up to `most`, before which the window is cached."""
        if self.cache is None:
            return 0
        # Looks up every key once: behind a missing one, no number of blocks from it on will do.
        index, findable = most - 1, self.cache.findable
        while most:
            first = self.first_needed(most * self._size)
            while index >= first and keys[index] in findable:
                index -= 1
            if index < first:
                return most
            most = index
            index -= 1
        return 0

    def admit(
        self, slot: int, num_tokens: int, *, keys: Sequence[bytes], num_hits: int, known: int
    ) -> list[int]:
        """Begin a table of at most `num_tokens` positions behind `num_hits` cached blocks; returns what it holds.

        `keys` name the full blocks of the prompt, of which the first `known` are computed, for all layers or for some.
        """
        first = self.first_needed(num_hits * self._size) if num_hits else 0
        held = Held(first, promised=self.promise(num_tokens), ends=(known, len(keys)))
        if self.cache is not None:
            held.pins += [self.cache.take(key) for key in keys[first:num_hits]]
        held.blocks += [pin.block for pin in held.pins if pin is not None]
        self._hold(slot, held)
        return list(held.blocks)

    def start(self, slot: int) -> int:
        """Return how many of the table's first blocks the slot does not hold."""
        return self._held[slot].first

    def room(self, slot: int) -> int:
        """Return the positions up to which the table of `slot` can grow now."""
        held = self._held[slot]
        more = held.reserved - len(held.blocks) + max(0, self.num_available)
        return (held.end + more) * self._size

    def grow(self, slot: int, count: int) -> list[int]:
        """Hand out the next `count` blocks, which `room` allows."""
        held = self._held[slot]
        self._num_reserved -= held.reserved
        blocks = [self._take() for _ in range(count)]
        held.blocks += blocks
        held.pins += [None] * count
        self._num_reserved += held.reserved
        return blocks

    def advance(self, slot: int, num_computed: int, keys: Sequence[bytes]) -> None:
        """Make the full blocks named by `keys` findable, and give back those that no later query reaches, but one.

        The last of them stays, so that the table can be parked at the boundary before. `num_computed` positions are
        computed by answered steps.
        """
        held = self._held[slot]
        if self.cache is not None:
            self._enter(held, keys)
        behind = self.first_needed(num_computed) - 1 - held.first
        if behind <= 0:
            return
        self._num_reserved -= held.reserved
        for block, pin in zip(held.blocks[:behind], held.pins[:behind], strict=True):
            self._leave(block, pin, keeps=self._keeps(held, held.first))
            held.first += 1
        del held.blocks[:behind], held.pins[:behind]
        self._num_reserved += held.reserved

    def forget(self, slot: int) -> None:
        """Remove the blocks of `slot` from the index: a value was not finite, and any of them may be the cause."""
        for pin in filter(None, self._held[slot].pins):
            assert self.cache is not None
            self.cache.forget(pin)
            if self._ledger is not None:
                self._ledger.unseal(pin.block)

    def release(self, slot: int) -> None:
        """Take back all blocks of `slot`; those in the cache stay findable."""
        self.give_back(self._held.pop(slot))

    def may_park(self, slot: int, positions: int) -> bool:
        """Return whether the slot holds what a query behind `positions` reads, and no other shares what it writes."""
        held, num_full = self._held[slot], positions // self._size
        own = held.pins[max(0, num_full - held.first) :][:1]
        is_shared = bool(positions % self._size and own and own[0] is not None)
        return held.first <= self.first_needed(positions) and not is_shared

    def park(self, slot: int, positions: int) -> Held:
        """Release `slot`, but keep what a query behind its first `positions` reads; `may_park` allows it."""
        held = self._held.pop(slot)
        self._num_reserved -= held.reserved
        count = -(-positions // self._size) - held.first
        rest = Held(held.first + count, held.blocks[count:], held.pins[count:])
        kept = Held(held.first, held.blocks[:count], held.pins[:count])
        self._num_reserved += kept.reserved + rest.reserved
        self.give_back(rest)
        return kept

    def unpark(self, slot: int, held: Held, num_tokens: int, num_keys: int) -> list[int]:
        """Begin a table with what `park` returned; returns its blocks."""
        self._num_reserved -= held.reserved
        held.promised, held.ends = self.promise(num_tokens), (num_keys,)
        self._hold(slot, held)
        return list(held.blocks)

    def give_back(self, held: Held) -> None:
        """Take back what `park` returned."""
        self._num_reserved -= held.reserved
        for block, pin in zip(reversed(held.blocks), reversed(held.pins), strict=True):
            self._leave(block, pin, keeps=True)

    def keys_by_block(self) -> dict[int, bytes]:
        """Return the key of each block that can be found."""
        return {} if self.cache is None else self.cache.keys_by_block()

    def _hold(self, slot: int, held: Held) -> None:
        self._held[slot] = held
        self._num_reserved += held.reserved

    def _enter(self, held: Held, keys: Sequence[bytes]) -> None:
        assert self.cache is not None
        # Entered blocks come first, but for those whose key another block has.
        for index in range(len(keys) - 1, held.first - 1, -1):
            at = index - held.first
            if held.pins[at] is not None:
                break
            spare = self.cache.give_up(keys[index])
            if spare is not None:
                self._free.append(spare)
                if self._ledger is not None:
                    self._ledger.unseal(spare)
            pin = held.pins[at] = self.cache.enter(keys[index], held.blocks[at])
            if pin is not None and self._ledger is not None:
                self._ledger.seal(pin.block, pin.key)

    def _keeps(self, held: Held, index: int) -> bool:
        """Return whether block `index` of a table lies in a tail that is kept: what a hit needs, and one block more."""
        # Runs for every block that is given back, so it makes few calls.
        size, reach = self._size, self._reach
        end = (index // self._stride + 1) * self._stride
        if (end * size - reach) // size <= index + 1:
            return True
        return any(index < end and (end * size - reach) // size <= index + 1 for end in held.ends)

    def _leave(self, block: int, pin: CachedBlock | None, *, keeps: bool) -> None:
        if pin is None:
            self._free.append(block)
        else:
            assert self.cache is not None
            self._free += self.cache.leave(pin, keeps=keeps)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_fresh:
            self._num_fresh -= 1
            return self._first + self.num_blocks - self._num_fresh
        assert self.cache is not None, "no block is free"
        return self.cache.evict()
