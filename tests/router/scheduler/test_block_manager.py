"""BlockManager, with and without a cache, against a plain model of the blocks of each slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace_router.request.block_hashes import child_key, root_key
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.prefix_cache import CachedBlock, PrefixCache
from millrace_testing.schedules.driver import check_blocks

SIZE = 4
NUM_BLOCKS = 19


def chain(*contents: int) -> list[bytes]:
    """Keys of full blocks that each repeat one token."""
    keys, parent = [], root_key()
    for content in contents:
        parent = child_key(parent, [content] * SIZE)
        keys.append(parent)
    return keys


@dataclass
class Held:
    """The expected state of a slot."""

    keys: list[bytes]
    num_tokens: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_forgotten: bool = False
    """Whether a block that it holds was made unfindable, by any of its holders."""


class BlockTableMachine(RuleBasedStateMachine):
    """Admissions with hits, growth, computing, failing, parking and releases in any order."""

    @initialize(caching=st.booleans())
    def begin(self, caching: bool) -> None:
        self.table = BlockManager(NUM_BLOCKS + 1, SIZE, PrefixCache() if caching else None)
        self.held: dict[int, Held] = {}
        self.parked: dict[int, tuple[Held, int]] = {}
        """What each request keeps, and its computed positions."""
        self.content: dict[int, bytes] = {}
        """Key of what was last computed in a block."""
        self.slot = 0

    @rule(
        contents=st.lists(st.integers(0, 1), max_size=6),
        more=st.integers(0, 40),
        may_hit=st.booleans(),
    )
    def admit(self, contents: list[int], more: int, may_hit: bool) -> None:
        keys, num_tokens = chain(*contents), SIZE * len(contents) + 1 + more
        hits = self.table.find(keys) if may_hit else []
        idle = sum(not hit.num_pins for hit in hits)
        needed = -(-num_tokens // SIZE) - len(hits) + idle
        shortage = self.table.shortage(num_tokens, hits)
        assert shortage == needed - self.table.num_available
        self.slot += 1
        if shortage > 0:
            with pytest.raises(ValueError, match="cannot promise"):
                self.table.admit(self.slot, num_tokens, hits=hits, keys=keys)
            return
        blocks = self.table.admit(self.slot, num_tokens, hits=hits, keys=keys)
        assert [self.content[block] for block in blocks] == keys[: len(hits)]
        self.held[self.slot] = Held(keys, num_tokens, blocks, len(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), beyond=st.integers(-40, 8))
    def grow(self, data: st.DataObject, beyond: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[slot]
        num_tokens = max(0, held.num_tokens + beyond)
        available = self.table.num_available
        blocks = self.table.grow(slot, num_tokens)
        if blocks is None:
            extra = -(-num_tokens // SIZE) - max(-(-held.num_tokens // SIZE), len(held.blocks))
            assert extra > available, "what was promised, or is there, is refused"
            return
        for block in blocks:
            self.content.pop(block, None)
        held.blocks += blocks
        assert len(held.blocks) * SIZE >= num_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[slot]
        most = min(len(held.blocks), len(held.keys))
        held.num_computed = data.draw(st.integers(min(held.num_computed, most), most))
        for key, block in zip(held.keys[: held.num_computed], held.blocks, strict=False):
            assert self.content.setdefault(block, key) == key
        self.table.enter(slot, held.keys[: held.num_computed])
        rivals = [h for h in self.holders() if h is not held and h.keys[:1] == held.keys[:1]]
        if self.table.cache is not None and not rivals and not held.is_forgotten:
            assert len(self.table.find(held.keys)) >= held.num_computed

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fails=st.booleans())
    def release(self, data: st.DataObject, fails: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        if fails:
            self.table.forget(slot)
            for held in self.holders():
                held.is_forgotten |= not set(held.blocks).isdisjoint(self.held[slot].blocks)
        available, releasable = self.table.num_available, self.table.num_releasable(slot)
        self.table.release(slot)
        assert self.table.num_available == available + releasable
        del self.held[slot]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        slots = [slot for slot, held in self.held.items() if held.num_computed] or list(self.held)
        slot = data.draw(st.sampled_from(slots))
        held = self.held.pop(slot)
        most = min(len(held.blocks), held.num_computed + 1) * SIZE
        positions = data.draw(st.integers(0, most))
        others = {block for each in self.holders() for block in each.blocks}
        self.table.park(slot, SchedulableRequest(request_id=slot), slot, positions)
        parked = self.table.parked(slot)
        if parked is None:
            assert positions < SIZE
            return
        num_blocks = -(-parked.num_positions // SIZE)
        assert parked.blocks == held.blocks[:num_blocks]
        if parked.num_positions < positions:
            assert parked.num_positions == positions // SIZE * SIZE
            cached = [] if self.table.cache is None else self.table.cache._blocks.values()
            shared = {each.block for each in cached} | others
            assert held.blocks[num_blocks] in shared or held.is_forgotten
        held.blocks, held.num_computed = list(parked.blocks), parked.num_positions // SIZE
        self.parked[slot] = held, parked.num_positions

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), more=st.integers(0, 40))
    def unpark(self, data: st.DataObject, more: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.parked)))
        held, positions = self.parked[number]
        parked = self.table.parked(number)
        assert parked is not None
        assert (parked.blocks, parked.num_positions) == (held.blocks, positions)
        num_tokens = max(positions, SIZE * len(held.keys)) + 1 + more
        missing = -(-num_tokens // SIZE) - len(held.blocks) - self.table.num_available
        assert self.table.shortage(num_tokens, num_held=len(held.blocks)) == missing
        self.slot += 1
        if missing > 0:
            with pytest.raises(ValueError, match="cannot promise"):
                self.table.unpark(self.slot, parked, num_tokens, keys=held.keys)
            return
        del self.parked[number]
        assert self.table.unpark(self.slot, parked, num_tokens, keys=held.keys) == held.blocks
        held.num_tokens = num_tokens
        self.held[self.slot] = held

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), is_junior=st.booleans())
    def free_parked(self, data: st.DataObject, *, is_junior: bool) -> None:
        if is_junior:
            number = max(self.parked)
            assert self.table.free_junior_parked()
        else:
            number = data.draw(st.sampled_from(sorted(self.parked)))
            self.table.free_parked(lambda request: request.request_id == number)
        del self.parked[number]
        assert self.table.parked(number) is None
        assert self.table.has_parked == bool(self.parked)

    def holders(self) -> list[Held]:
        return [*self.held.values(), *(held for held, _ in self.parked.values())]

    @invariant()
    def everything_is_in_one_place(self) -> None:
        if not hasattr(self, "table"):
            return
        check_blocks(self.table)
        table = self.table
        counts = table.num_free, table.num_cached, table.num_owned, table.num_parked
        assert sum(counts) == NUM_BLOCKS
        for held in self.holders():
            others = {b for other in self.holders() if other is not held for b in other.blocks}
            written = held.blocks[held.num_computed :]
            assert not set(written) & others, (
                "a block that is written is also held by another sequence"
            )
        if table.cache is not None:
            for key, cached in table.cache._blocks.items():
                assert self.content[cached.block] == key, "a key leads to other content"
            expected = {key for h in self.held.values() for key in h.keys[h.num_computed :]}
            assert set(table.cache._expected) == expected


TestBlockTable = BlockTableMachine.TestCase


@given(st.integers(-3, 1), st.integers(-1, 4))
def test_an_empty_table_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="no block"):
        BlockManager(num_blocks, block_size)


def test_a_slot_is_admitted_once() -> None:
    table = BlockManager(8, SIZE)
    table.admit(0, 8)
    with pytest.raises(ValueError, match="slot 0"):
        table.admit(0, 8)


def test_growth_beyond_the_promise_takes_no_block_promised_to_others() -> None:
    table = BlockManager(6, SIZE)
    table.admit(0, 8)
    table.admit(1, 8)
    assert len(table.grow(0, 8) or ()) == 2
    assert len(table.grow(0, 12) or ()) == 1
    assert table.grow(0, 16) is None, "that would be one of those promised to the other"
    assert len(table.grow(1, 8) or ()) == 2


def test_blocks_are_handed_out_lowest_first_and_the_last_returned_again_first() -> None:
    """A lightly loaded server then uses little KV memory, because a CPU maps memory on first use."""
    table = BlockManager(10, SIZE)
    table.admit(0, 12)
    assert table.grow(0, 12) == [1, 2, 3]
    table.admit(1, 8)
    assert table.grow(1, 8) == [4, 5]
    table.release(0)
    table.admit(2, 16)
    assert table.grow(2, 16) == [1, 2, 3, 6]


def test_free_blocks_are_handed_out_before_cached_ones() -> None:
    table = BlockManager(6, SIZE, PrefixCache())
    keys = chain(1, 2)
    table.admit(0, 8, keys=keys)
    table.grow(0, 8)
    table.enter(0, keys)
    table.release(0)
    table.admit(1, 20)
    assert table.grow(1, 12) == [3, 4, 5]
    assert len(table.find(keys)) == 2
    assert table.grow(1, 16) == [2], "the leaf goes first"
    assert table.grow(1, 20) == [1]
    assert table.find(keys) == []


def test_an_equal_block_that_is_idle_gives_way_so_that_no_sequence_holds_more_than_promised() -> (
    None
):
    table = BlockManager(9, SIZE, PrefixCache())
    keys = chain(1, 2)
    for slot in (0, 1):
        table.admit(slot, 9, keys=keys)
        table.grow(slot, 9)
        if slot == 0:
            table.enter(0, keys)
            table.release(0)
    table.admit(2, 20)
    assert table.num_available == 0
    table.enter(1, keys)
    assert table.num_available == 0
    assert [hit.block for hit in table.find(keys)] == table._holdings[1].blocks[:2]
    assert len(table.grow(2, 20) or ()) == 5


def test_an_equal_block_that_is_held_is_not_held_twice() -> None:
    table = BlockManager(9, SIZE, PrefixCache())
    one, two = chain(1, 2), chain(1, 3)
    for slot, keys in enumerate((one, two)):
        table.admit(slot, 9, keys=keys)
        table.grow(slot, 9)
        table.enter(slot, keys)
    assert len(table.find(two)) == 1, "a chain is entered from its beginning or not at all"
    table.release(0)
    assert table.num_owned == 3
    table.enter(1, two)
    assert len(table.find(two)) == 2, "once the other has gone, it is"


def test_blocks_that_were_never_handed_out_take_no_memory_and_come_in_order() -> None:
    table = BlockManager(1 << 40, 16)
    assert table.admit(0, 32) == []
    assert table.grow(0, 32) == [1, 2]
    table.release(0)
    table.admit(1, 48)
    assert table.grow(1, 48) == [1, 2, 3]
    assert table.num_free == (1 << 40) - 1 - 3


KEYS = [b"root", b"stem", b"leaf"]


def enter(cache: PrefixCache, keys: Sequence[bytes], first_block: int) -> list[CachedBlock]:
    """A sequence that computed all of `keys` itself and holds them."""
    blocks = [cache.enter(key, first_block + i) for i, key in enumerate(keys)]
    entered = [block for block in blocks if block is not None]
    assert len(entered) == len(keys)
    return entered


def blocks_of(cache: PrefixCache, keys: Sequence[bytes]) -> list[int]:
    return [block.block for block in cache.find(keys)]


def test_a_lookup_yields_the_longest_known_beginning() -> None:
    cache = PrefixCache()
    enter(cache, KEYS, 1)
    assert blocks_of(cache, [*KEYS, b"more"]) == [1, 2, 3]
    assert blocks_of(cache, KEYS[:2]) == [1, 2]
    assert blocks_of(cache, [b"other", *KEYS]) == []
    assert blocks_of(cache, [KEYS[0], b"other", KEYS[2]]) == [1]


def test_eviction_takes_leaves_before_their_parents() -> None:
    cache = PrefixCache()
    cache.unpin(enter(cache, KEYS, 1))
    assert [cache.evict(), cache.evict(), cache.evict()] == [3, 2, 1]
    assert cache.find(KEYS) == []
    with pytest.raises(KeyError):
        cache.evict()


def test_eviction_takes_the_chain_that_was_used_longest_ago() -> None:
    cache = PrefixCache()
    old, new = enter(cache, [b"a1", b"a2"], 1), enter(cache, [b"b1", b"b2"], 3)
    cache.unpin(old)
    cache.unpin(new)
    blocks = cache.find([b"a1"])
    cache.pin(blocks)
    cache.unpin(blocks)
    assert [cache.evict() for _ in range(4)] == [2, 4, 3, 1], "a hit renews what it covers alone"


def test_a_pinned_block_is_not_evicted_and_is_idle_only_when_the_last_holder_leaves() -> None:
    cache = PrefixCache()
    first = enter(cache, KEYS, 1)
    second = cache.find(KEYS[:2])
    cache.pin(second)
    cache.unpin(first)
    assert cache.num_idle == 1
    assert cache.evict() == 3
    cache.unpin(second)
    assert cache.num_idle == 2


def test_of_two_equal_blocks_the_one_that_is_held_stays() -> None:
    cache = PrefixCache()
    enter(cache, KEYS[:1], 1)
    assert cache.enter(KEYS[0], 9) is None
    assert blocks_of(cache, KEYS[:1]) == [1]
    assert cache.give_up(KEYS[0]) is None


def test_an_idle_block_can_be_released() -> None:
    cache = PrefixCache()
    cache.unpin(enter(cache, KEYS[:1], 1))
    assert cache.give_up(KEYS[0]) == 1
    assert (cache.num_idle, cache.find(KEYS)) == (0, [])
    assert cache.give_up(b"unknown") is None


def test_a_forgotten_block_is_not_found_and_is_free_once_no_sequence_holds_it() -> None:
    cache = PrefixCache()
    first = enter(cache, KEYS[:2], 1)
    second = cache.find(KEYS[:1])
    cache.pin(second)
    for block in first:
        cache.forget(block)
    assert cache.find(KEYS) == []
    again = enter(cache, KEYS[:1], 7)
    assert cache.unpin(first) == [2]
    assert cache.unpin(second) == [1]
    assert blocks_of(cache, KEYS) == [7], "what was computed anew under the same key stays"
    assert cache.unpin(again) == []


def test_a_key_is_expected_until_every_request_that_would_compute_it_left() -> None:
    cache = PrefixCache()
    cache.expect(KEYS)
    cache.expect(KEYS[:1])
    cache.unexpect(KEYS)
    assert cache.expects(KEYS[0])
    assert not cache.expects(KEYS[1])
    cache.unexpect(KEYS[:1])
    assert not cache.expects(KEYS[0])
