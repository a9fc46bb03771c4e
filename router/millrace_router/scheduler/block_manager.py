"""Which sequence owns which KV blocks. Pure bookkeeping; the shards use the blocks that a step names."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace_router.scheduler.prefix_cache import CachedBlock, PrefixCache
from millrace_router.scheduler.step_plan import Row


@dataclass(slots=True, eq=False)
class _Holding:
    """The blocks of one slot."""

    blocks: list[int] = field(default_factory=list)
    """In table order."""
    pins: list[CachedBlock] = field(default_factory=list)
    """The first of those blocks, as far as they are in the cache."""
    keys: Sequence[bytes] = ()
    """Keys of the prompt's full blocks; the cache expects those after `num_computed`."""
    num_computed: int = 0
    num_promised: int = 0

    def private(self) -> list[int]:
        """Return blocks that no other slot holds, and that are not in the cache."""
        return self.blocks[len(self.pins) :]


class BlockManager:
    """Hands out fixed-size KV blocks one by one, shares them through the prefix cache, and takes them back.

    Invariant: free + cached + owned = num_blocks - 1 (block 0 is the shards' scratch block and is never handed out).
    Free and cached blocks together always cover every promise, so growing within a promise cannot fail.
    """

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache | None = None) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"no block to hand out: {num_blocks=} {block_size=}")
        self.block_size = block_size
        self.num_blocks = num_blocks - 1
        self.cache = cache
        self._free: list[int] = []
        """Blocks that were handed out and are free again; the last is handed out next."""
        self._num_fresh = self.num_blocks
        """Blocks that were never handed out, which are the last ones; they come in order, after those in `_free`."""
        self._holdings: dict[int, _Holding] = {}
        self._num_promised = 0

    @property
    def num_free(self) -> int:
        return len(self._free) + self._num_fresh

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds, kept because another request may need their content."""
        return self.cache.num_idle if self.cache is not None else 0

    @property
    def num_owned(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_reserved(self) -> int:
        """Blocks owned, or promised to a sequence that has been admitted."""
        return self.num_owned + self._num_promised

    @property
    def num_reserved_tokens(self) -> int:
        """KV positions of the reserved blocks."""
        return self.num_reserved * self.block_size

    @property
    def num_available(self) -> int:
        """Blocks that are neither owned nor promised."""
        # Runs in every step, so it does not call `num_reserved`.
        return len(self._free) + self._num_fresh + self.num_cached - self._num_promised

    def count(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def find(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """Return the cached blocks at the beginning of the chain `keys`."""
        return self.cache.find(keys) if self.cache is not None else []

    def expects(self, key: bytes) -> bool:
        """Return whether an admitted sequence is going to compute the block `key`."""
        return self.cache is not None and self.cache.expects(key)

    def shortage(self, num_tokens: int, hits: Sequence[CachedBlock] = ()) -> int:
        """Return blocks that are missing for a promise of `num_tokens`; negative if some remain."""
        revived = sum(not hit.num_pins for hit in hits)
        return self.count(num_tokens) - len(hits) + revived - self.num_available

    def admit(
        self,
        slot: int,
        num_tokens: int,
        *,
        hits: Sequence[CachedBlock] = (),
        keys: Sequence[bytes] = (),
    ) -> list[int]:
        """Begin a table with the cached blocks `hits`, and promise the other blocks for `num_tokens` positions.

        `keys` name the full blocks of the prompt, `hits` included. Returns the blocks in the table.

        Raises:
            ValueError: the slot is in use, or blocks are missing.

        """
        if slot in self._holdings or self.shortage(num_tokens, hits) > 0:
            raise ValueError(f"cannot promise {num_tokens} tokens to slot {slot}")
        holding = _Holding([hit.block for hit in hits], list(hits), keys, len(hits))
        holding.num_promised = max(0, self.count(num_tokens) - len(hits))
        self._num_promised += holding.num_promised
        self._holdings[slot] = holding
        if self.cache is not None:
            self.cache.pin(hits)
            self.cache.expect(keys[len(hits) :])
        return list(holding.blocks)

    def grow(self, slot: int, num_tokens: int) -> list[int] | None:
        """Hand out the blocks that `slot` lacks for `num_tokens` positions, in order; None if too few are free."""
        holding = self._holdings[slot]
        missing = self.count(num_tokens) - len(holding.blocks)
        if missing <= 0:
            return []
        promised = min(missing, holding.num_promised) if holding.num_promised else 0
        if missing - promised > self.num_available:
            return None
        if promised:
            holding.num_promised -= promised
            self._num_promised -= promised
        blocks = [self._take() for _ in range(missing)]
        holding.blocks += blocks
        return blocks

    def enter(self, slot: int, keys: Sequence[bytes]) -> None:
        """Make the first blocks of `slot`, whose KV is computed, findable by `keys`.

        An idle block with the same key is dropped in favour of the new one. A held block with the same key stays.
        The slot cannot hold that block too, because this would take a block that was not promised: later blocks of the
        slot are not entered as long as it is there.
        """
        if self.cache is None:
            return
        holding = self._holdings[slot]
        if holding.num_computed < len(holding.keys):
            self.cache.unexpect(holding.keys[holding.num_computed : len(keys)])
        holding.num_computed = max(holding.num_computed, len(keys))
        pins, blocks = holding.pins, holding.blocks
        for index in range(len(pins), len(keys)):
            key = keys[index]
            spare = self.cache.give_up(key)
            if spare is not None:
                self._free.append(spare)
            pin = self.cache.enter(key, blocks[index])
            if pin is None:
                break
            pins.append(pin)

    def forget(self, slot: int) -> None:
        """Remove the blocks of `slot` from the index: a value was not finite, and any of them may be the cause."""
        if self.cache is not None:
            for pin in self._holdings[slot].pins:
                self.cache.forget(pin)

    def num_releasable(self, slot: int) -> int:
        """Return blocks that releasing `slot` makes available, its promise included."""
        holding = self._holdings[slot]
        last_pins = sum(pin.num_pins == 1 for pin in holding.pins)
        return len(holding.private()) + last_pins + holding.num_promised

    def release(self, slot: int) -> None:
        """Take back all blocks and promises of `slot`; its cached blocks stay findable."""
        holding = self._holdings.pop(slot)
        self._num_promised -= holding.num_promised
        self._free.extend(reversed(holding.private()))
        if self.cache is not None:
            self.cache.unexpect(holding.keys[holding.num_computed :])
            self._free.extend(self.cache.unpin(holding.pins))

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_fresh:
            self._num_fresh -= 1
            return self.num_blocks - self._num_fresh
        assert self.cache is not None, "no block is free"
        return self.cache.evict()


def grow(row: Row, blocks: BlockManager, grown: list[tuple[int, int]]) -> bool:
    """Give `row` the blocks for its planned positions, and add them to `grown`; False if too few are free."""
    new = blocks.grow(row.slot, row.num_kv_tokens)
    if new is None:
        return False
    grown += [(row.slot, block) for block in new]
    row.num_kv_owned += len(new) * blocks.block_size
    return True


def advance(
    filled: Iterable[tuple[int, int]],
    rows: tuple[Mapping[int, Row], Mapping[int, Row]],
    blocks: BlockManager,
    failed_slots: Container[int],
) -> None:
    """Count the filled positions, given as (slot, number), for the row of each slot, and enter full blocks.

    A slot is in at most one of the two mappings. The blocks of `failed_slots` are removed from the cache.
    """
    running, preempted = rows
    size, is_caching = blocks.block_size, blocks.cache is not None
    for slot, num_tokens in filled:
        # Runs for every generated token, so it makes few calls.
        row = running.get(slot) or preempted.get(slot)
        if row is None:
            continue
        row.num_computed += num_tokens
        if not is_caching:
            continue
        if slot in failed_slots:
            blocks.forget(slot)
        elif row.num_computed >= row.num_entered + size:
            num_full = row.num_computed // size
            if row.is_multi_token:
                # Accepted draft tokens are not delivered yet.
                num_full = min(row.num_computed, row.entry.num_inputs) // size
            blocks.enter(slot, row.entry.block_keys(num_full))
            row.num_entered = num_full * size
