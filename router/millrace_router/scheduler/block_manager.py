"""Which sequence owns which KV blocks. Pure bookkeeping; the shards use the blocks that a step names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_ledger import BlockLedger, StoredBlocks, sealed_alike
from millrace_router.scheduler.prefix_cache import CachedBlock, PrefixCache
from millrace_router.scheduler.state_pages import StatePages
from millrace_router.scheduler.step_plan import Row
from millrace_router.scheduler.window_blocks import Held, WindowBlocks


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


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """The blocks that a request has computed, and keeps without a slot from an epoch's end to its next admission."""

    request: SchedulableRequest
    seniority: int
    num_positions: int
    """KV positions that are computed: all of the blocks but the last one, and the beginning of that one."""
    blocks: list[int]
    """In table order."""
    pins: list[CachedBlock]
    """The first of those blocks, as far as they are in the cache; the last block is not if it is not full."""
    windows: list[Held]
    """What it keeps of each window group."""


class BlockManager:
    """Hands out fixed-size KV blocks one by one, shares them through the prefix cache, and takes them back.

    All counts are of the blocks of layers that need every position. Layers with a window have other blocks, in
    `windows`, whose tables grow at the same time. A list of a table's blocks has this group's, then each window's.

    Invariant: free + cached + owned + parked = num_blocks - 1 (block 0 is the shards' scratch block and is never handed
    out). Free and cached blocks together always cover every promise, so growing within a promise cannot fail.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache | None = None,
        ledger: BlockLedger | None = None,
        windows: Sequence[WindowBlocks] = (),
        states: StatePages | None = None,
    ) -> None:
        """`ledger` is for shards whose KV outlives them, `states` for models with recurrent layers."""
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"no block to hand out: {num_blocks=} {block_size=}")
        self.block_size = block_size
        self.num_blocks = num_blocks - 1
        self.cache = cache
        self.ledger = ledger
        self.windows = windows
        self.states = states
        self._free: list[int] = []
        """Blocks that were handed out and are free again; the last is handed out next."""
        self._num_fresh = self.num_blocks
        """Blocks that were never handed out, which are the last ones; they come in order, after those in `_free`."""
        self._holdings: dict[int, _Holding] = {}
        self._num_promised = 0
        self._parked: dict[int, Parked] = {}
        """By request id."""

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
        return self.num_blocks - self.num_free - self.num_cached - self.num_parked

    @property
    def num_parked(self) -> int:
        """Blocks that only parked requests hold."""
        if not self._parked:
            return 0
        pins = Counter(pin for parked in self._parked.values() for pin in parked.pins)
        num_private = sum(len(each.blocks) - len(each.pins) for each in self._parked.values())
        return num_private + sum(pin.num_pins == count for pin, count in pins.items())

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences own, in the group where it is largest; 0 to 1."""
        shares = [each.num_owned / each.num_blocks for each in self.windows]
        return max(self.num_owned / self.num_blocks, *shares, 0.0)

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
        """Return the cached blocks at the beginning of the chain `keys`, as many as every window is cached before."""
        if self.cache is None:
            return []
        hits = self.cache.find(keys)
        count, before = len(hits), -1
        while count != before:
            before = count
            for window in self.windows:
                count = window.longest_hit(keys, count)
        return hits if count == len(hits) else hits[:count]

    def expects(self, key: bytes) -> bool:
        """Return whether an admitted sequence is going to compute the block `key`."""
        return self.cache is not None and self.cache.expects(key)

    def shortage(
        self, num_tokens: int, hits: Sequence[CachedBlock] = (), *, num_held: int = 0
    ) -> int:
        """Return blocks that are missing for a promise of `num_tokens`; negative if some remain.

        The request brings along the cached blocks `hits`, or `num_held` parked blocks.
        """
        revived = sum(not hit.num_pins for hit in hits)
        return self.count(num_tokens) - len(hits) - num_held + revived - self.num_available

    def window_shortage(
        self, longest: int, *, kept_free: int = 0, parked: Parked | None = None
    ) -> int:
        """Return window blocks that are missing for a sequence of at most `longest` positions; negative if some remain.

        `kept_free` is the length of another one that has to fit as well.
        """
        return max(
            window.promise(longest)
            + (window.promise(kept_free) if kept_free else 0)
            - (len(parked.windows[index].blocks) if parked is not None else 0)
            - window.num_available
            for index, window in enumerate(self.windows)
        )

    def window_room(self, slot: int) -> int:
        """Return the positions up to which the windows let the table of `slot` grow now."""
        return min(window.room(slot) for window in self.windows)

    def window_starts(self, slot: int) -> tuple[int, ...]:
        """Return how many of its first blocks the table of `slot` has no more in each window group."""
        return tuple(window.start(slot) for window in self.windows)

    def admit(
        self,
        slot: int,
        num_tokens: int,
        *,
        hits: Sequence[CachedBlock] = (),
        keys: Sequence[bytes] = (),
        longest: int = 0,
    ) -> list[int]:
        """Begin a table with the cached blocks `hits`, and promise the other blocks for `num_tokens` positions.

        `keys` name the full blocks of the prompt, `hits` included. The sequence never has more than `longest`
        positions, which windows have to know. Returns the blocks in the table.

        Raises:
            ValueError: the slot is in use, or blocks are missing.

        """
        lacks_window = self.windows and self.window_shortage(longest) > 0
        if slot in self._holdings or lacks_window or self.shortage(num_tokens, hits) > 0:
            raise ValueError(f"cannot promise {num_tokens} tokens to slot {slot}")
        holding = _Holding([hit.block for hit in hits], list(hits), keys, len(hits))
        holding.num_promised = max(0, self.count(num_tokens) - len(hits))
        self._num_promised += holding.num_promised
        self._holdings[slot] = holding
        if self.cache is not None:
            self.cache.pin(hits)
            self.cache.expect(keys[len(hits) :])
        blocks = list(holding.blocks)
        if self.windows:
            known = 0 if self.cache is None else len(self.cache.find(keys))
            for window in self.windows:
                blocks += window.admit(slot, longest, keys=keys, num_hits=len(hits), known=known)
        return blocks

    def grow(self, slot: int, num_tokens: int) -> list[int] | None:
        """Hand out the blocks that `slot` lacks for `num_tokens` positions, in order; None if too few are free."""
        holding = self._holdings[slot]
        missing = self.count(num_tokens) - len(holding.blocks)
        if missing <= 0:
            return []
        if self.windows and num_tokens > self.window_room(slot):
            return None
        promised = min(missing, holding.num_promised) if holding.num_promised else 0
        if missing - promised > self.num_available:
            return None
        if promised:
            holding.num_promised -= promised
            self._num_promised -= promised
        blocks = [self._take() for _ in range(missing)]
        holding.blocks += blocks
        for window in self.windows:
            blocks += window.grow(slot, missing)
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
                if self.ledger is not None:
                    self.ledger.unseal(spare)
            pin = self.cache.enter(key, blocks[index])
            if pin is None:
                break
            pins.append(pin)
            if self.ledger is not None:
                self.ledger.seal(pin.block, key)

    def forget(self, slot: int) -> None:
        """Remove the blocks of `slot` from the index: a value was not finite, and any of them may be the cause."""
        if self.cache is not None:
            for pin in self._holdings[slot].pins:
                self.cache.forget(pin)
                if self.ledger is not None:
                    self.ledger.unseal(pin.block)
        for window in self.windows:
            window.forget(slot)

    def num_releasable(self, slot: int) -> int:
        """Return blocks that releasing `slot` makes available, its promise included."""
        holding = self._holdings[slot]
        last_pins = sum(pin.num_pins == 1 for pin in holding.pins)
        return len(holding.private()) + last_pins + holding.num_promised

    def release(self, slot: int) -> None:
        """Take back all blocks and promises of `slot`; its cached blocks stay findable."""
        holding = self._holdings.pop(slot)
        self._num_promised -= holding.num_promised
        self._unexpect(holding)
        self._give_back(holding.private(), holding.pins)
        for window in self.windows:
            window.release(slot)

    def park(self, slot: int, request: SchedulableRequest, seniority: int, positions: int) -> None:
        """Release `slot`, but keep the blocks with its first `positions` KV positions for `request`.

        A half-filled last block is kept, too, unless another sequence may share it: it is going to be written.
        Of a request without computed positions nothing is kept.
        """
        holding, size = self._holdings[slot], self.block_size
        num_full = positions // size
        if num_full < len(holding.pins):
            positions = num_full * size
        if not all(window.may_park(slot, positions) for window in self.windows):
            positions = num_full * size
            if not all(window.may_park(slot, positions) for window in self.windows):
                positions = num_full = 0
        num_blocks, num_pins = self.count(positions), min(num_full, len(holding.pins))
        if num_blocks:
            kept, pins = holding.blocks[:num_blocks], holding.pins[:num_pins]
            windows = [window.park(slot, positions) for window in self.windows]
            parked = Parked(request, seniority, positions, kept, pins, windows)
            self._parked[request.request_id] = parked
        else:
            for window in self.windows:
                window.release(slot)
        del self._holdings[slot]
        self._num_promised -= holding.num_promised
        self._unexpect(holding)
        first = max(num_blocks, len(holding.pins))
        self._give_back(holding.blocks[first:], holding.pins[num_pins:])

    @property
    def has_parked(self) -> bool:
        """Whether any request has parked blocks."""
        return bool(self._parked)

    def parked(self, request_id: int) -> Parked | None:
        """Return what the request has parked."""
        return self._parked.get(request_id)

    def unpark(
        self,
        slot: int,
        parked: Parked,
        num_tokens: int,
        *,
        keys: Sequence[bytes] = (),
        longest: int = 0,
    ) -> list[int]:
        """Begin a table with the `parked` blocks, and promise the other blocks for `num_tokens` positions.

        `keys` name the full blocks of the request's tokens; `longest` is as in `admit`. Returns the table's blocks.

        Raises:
            ValueError: the slot is in use, blocks are missing, or the blocks are not parked any more.

        """
        num_held = len(parked.blocks)
        is_parked = self._parked.get(parked.request.request_id) is parked
        lacks_blocks = self.shortage(num_tokens, num_held=num_held) > 0
        if slot in self._holdings or lacks_blocks or not is_parked:
            raise ValueError(f"cannot promise {num_tokens} tokens to slot {slot}")
        del self._parked[parked.request.request_id]
        num_full = parked.num_positions // self.block_size
        holding = _Holding(parked.blocks, parked.pins, keys, num_full)
        holding.num_promised = max(0, self.count(num_tokens) - num_held)
        self._num_promised += holding.num_promised
        self._holdings[slot] = holding
        if self.cache is not None:
            self.cache.expect(keys[num_full:])
        blocks = list(holding.blocks)
        for window, held in zip(self.windows, parked.windows, strict=True):
            blocks += window.unpark(slot, held, longest, len(keys))
        return blocks

    def free_parked(self, leaves: Callable[[SchedulableRequest], bool]) -> None:
        """Take back what the requests have parked for which `leaves` is true."""
        for parked in [each for each in self._parked.values() if leaves(each.request)]:
            self._free_parked(parked)

    def free_junior_parked(self, *, but: Parked | None = None) -> bool:
        """Take back what the most junior request has parked, `but` left aside; whether there was any."""
        others = (each for each in self._parked.values() if each is not but)
        junior = max(others, key=lambda each: each.seniority, default=None)
        if junior is not None:
            self._free_parked(junior)
        return junior is not None

    def settle(self, ranks: Sequence[StoredBlocks]) -> str | None:
        """Compare parked and cached blocks, and copies of states, with the directories of all `ranks`.

        Returns what `BlockLedger.settle` does.
        """
        if self.ledger is None:
            return "life"
        held: dict[int, bytes | None] = {}
        for parked in self._parked.values():
            held.update(dict.fromkeys(parked.blocks))
            held.update(dict.fromkeys(block for each in parked.windows for block in each.blocks))
        if self.cache is not None:
            held.update(self.cache.keys_by_block())
        for window in self.windows:
            held.update(window.keys_by_block())
        if self.states is not None:
            held.update(self.states.keys_by_page())
        return self.ledger.settle(ranks, held)

    def adopt(self, ranks: Sequence[StoredBlocks], mark: int) -> int:
        """Take the full blocks of a router that is gone into the prefix cache; return how many.

        Copies of states are taken, too. `ranks` are the directories of all ranks; `mark` is as in `new_life`. Without
        effect on any doubt, and for models with windows, whose prompts cannot go on from these blocks only. No block
        has been handed out.
        """
        if self.cache is None or self.ledger is None or self.windows or not ranks:
            return 0
        sealed = sealed_alike(ranks, mark) or {}
        adopted = self.cache.adopt(
            {block: key for block, key in sealed.items() if 1 <= block <= self.num_blocks}
        )
        if adopted:
            pages = [] if self.states is None else self.states.adopt(sealed)
            self.ledger.adopt(ranks[0], [*adopted, *pages])
            self._free = [each for each in range(self.num_blocks, 0, -1) if each not in adopted]
            self._num_fresh = 0
        return len(adopted)

    def release_all(self) -> None:
        """Release every slot: no step in flight names any."""
        for slot in list(self._holdings):
            self.release(slot)
        if self.states is not None:
            self.states.release_all()

    def _free_parked(self, parked: Parked) -> None:
        del self._parked[parked.request.request_id]
        self._give_back(parked.blocks[len(parked.pins) :], parked.pins)
        for window, held in zip(self.windows, parked.windows, strict=True):
            window.give_back(held)

    def _unexpect(self, holding: _Holding) -> None:
        if self.cache is not None:
            self.cache.unexpect(holding.keys[holding.num_computed :])

    def _give_back(self, private: Sequence[int], pins: Sequence[CachedBlock]) -> None:
        self._free.extend(reversed(private))
        if self.cache is not None:
            self._free.extend(self.cache.unpin(pins))

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
    if blocks.ledger is not None and new:
        blocks.ledger.hand_out(new, row.entry.request_id)
    if new:
        row.num_kv_owned = blocks.count(row.num_kv_tokens) * blocks.block_size
    return True


def advance(
    filled: Iterable[tuple[int, int]],
    rows: tuple[Mapping[int, Row], Mapping[int, Row]],
    blocks: BlockManager,
    failed_slots: Container[int],
) -> None:
    """Count the filled positions, given as (slot, number), for the row of each slot, and enter full blocks.

    A slot is in at most one of the two mappings. The blocks of `failed_slots` are removed from the cache. Blocks behind
    the windows of a row are given back.
    """
    running, preempted = rows
    size, windows = blocks.block_size, blocks.windows
    is_caching = blocks.cache is not None
    for slot, num_tokens in filled:
        # Runs for every generated token, so it makes few calls.
        row = running.get(slot) or preempted.get(slot)
        if row is None:
            continue
        row.num_computed += num_tokens
        if not (is_caching or windows):
            continue
        if slot in failed_slots:
            blocks.forget(slot)
        elif row.num_computed >= row.num_entered + size:
            num_full = row.num_computed // size
            if row.is_multi_token:
                # Accepted draft tokens are not delivered yet.
                num_full = min(row.num_computed, row.entry.num_inputs) // size
            keys = row.entry.block_keys(num_full) if is_caching else ()
            blocks.enter(slot, keys)
            row.num_entered = num_full * size
            for window in windows:
                window.advance(slot, row.num_computed, keys)
