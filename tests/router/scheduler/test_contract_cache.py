"""TGI's own cases for the block allocator and the trie (contract 9.2, 9.3), on our table and our hashes.

Where we differ by design:

* Blocks have one size and are shared whole. TGI's trie splits a run of tokens between nodes and cuts leaves; a chain of
  hashes over full blocks finds the same block-aligned prefixes with a dictionary look-up for each.
* At least the last token's block is computed, in its own block. TGI takes a prompt that is cached whole less one
  token, and computes that one into a block that others share.
* Blocks are entered when their KV is computed, not when a request is freed: what was never computed is never found.
  Generated tokens are entered as well as prompts.
* Blocks are handed out from the lowest number on, so that memory that is mapped on first touch stays small, and the one
  freed last first. TGI takes from the end of its list; neither order can be seen from outside.
* Eviction is of whole blocks, least recently used, leaves before their parents.
"""

from __future__ import annotations

import random

from millrace_router.request.block_hashes import BlockHashes
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_testing.schedules.driver import check_blocks


class Allocator:
    """TGI's `alloc(tokens, prompt)` and `free` on our table: computing comes between, as it does in life."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.size = block_size
        self.table = BlockManager(num_blocks, block_size, PrefixCache())
        self._slots = 0
        self._prompts: dict[int, list[int]] = {}

    def alloc(self, num_tokens: int, prompt: list[int]) -> tuple[int, list[int], int] | None:
        """(slot, blocks, cached tokens), or None when it does not fit."""
        keys = BlockHashes(self.size).first(len(prompt) // self.size, prompt, [])
        hits = self.table.find(keys[: (len(prompt) - 1) // self.size])
        if self.table.shortage(num_tokens, hits) > 0:
            return None
        slot, self._slots = self._slots, self._slots + 1
        blocks = self.table.admit(slot, num_tokens, hits=hits, keys=keys)
        blocks += self.table.grow(slot, num_tokens) or []
        self._prompts[slot] = prompt
        return slot, blocks, len(hits) * self.size

    def free(self, slot: int) -> None:
        prompt = self._prompts.pop(slot)
        keys = BlockHashes(self.size).first(len(prompt) // self.size, prompt, [])
        self.table.enter(slot, keys)
        self.table.release(slot)

    def must(self, num_tokens: int, prompt: list[int]) -> tuple[int, list[int], int]:
        allocation = self.alloc(num_tokens, prompt)
        assert allocation is not None
        return allocation


class TestAllocator:
    """9.2. The last token of a prompt is always computed, hence prefixes one block shorter than TGI's."""

    def test_blocks_of_two_tokens_are_shared_whole(self) -> None:
        allocator = Allocator(2, 12)
        slot, blocks, cached = allocator.must(8, [0, 1, 2, 3])
        assert (len(set(blocks)), cached) == (4, 0)
        allocator.free(slot)
        _, again, cached = allocator.must(8, [0, 1, 2, 3])
        assert cached == 2, "TGI: 4, less the token it computes again in a shared block"
        assert again[0] == blocks[0]

    def test_not_aligned(self) -> None:
        allocator = Allocator(2, 12)
        slot, blocks, cached = allocator.must(7, [0, 1, 2])
        assert (len(blocks), cached) == (4, 0)
        allocator.free(slot)
        assert allocator.must(7, [0, 1, 2])[2] == 2

    def test_freed_blocks_are_found_again(self) -> None:
        allocator = Allocator(1, 12)
        slot, blocks, _ = allocator.must(8, [0, 1, 2, 3])
        allocator.free(slot)
        _, again, cached = allocator.must(8, [0, 1, 2, 3])
        assert (cached, again[:3]) == (3, blocks[:3])

    def test_the_one_freed_first_is_evicted_first(self) -> None:
        allocator = Allocator(1, 7)
        a, a_blocks, _ = allocator.must(4, [0, 1, 2, 3])
        b, _, _ = allocator.must(2, [4, 5])
        allocator.free(a)
        allocator.free(b)
        _, blocks, cached = allocator.must(4, [6, 7, 8, 9])
        assert (sorted(blocks), cached) == (sorted(a_blocks), 0)

    def test_equal_prompts_share_only_what_is_computed(self) -> None:
        allocator = Allocator(1, 10)
        first, _, _ = allocator.must(4, [0, 1, 2, 3])
        second, _, cached = allocator.must(4, [0, 1, 2, 3])
        assert cached == 0, "nothing is shared before it is computed"
        allocator.free(second)
        allocator.free(first)
        assert allocator.must(4, [0, 1, 2, 3])[2] == 3
        assert allocator.table.num_free == 4
        assert allocator.table.num_available == 5

    def test_prompts_share_their_common_beginning(self) -> None:
        allocator = Allocator(1, 20)
        a, a_blocks, _ = allocator.must(4, [0, 1, 9])
        allocator.free(a)
        b, b_blocks, b_cached = allocator.must(8, [0, 1, 2, 3, 4, 5])
        c, c_blocks, c_cached = allocator.must(8, [0, 1, 2, 3, 6, 7])
        assert (b_cached, c_cached) == (2, 2)
        assert b_blocks[:2] == c_blocks[:2] == a_blocks[:2]
        assert not set(b_blocks[2:]) & set(c_blocks[2:])
        allocator.free(c)
        allocator.free(b)
        _, d_blocks, cached = allocator.must(6, [0, 1, 2, 3, 4, 5])
        assert cached == 5
        assert d_blocks[:4] == b_blocks[:4], "of equal blocks the one in use longest stays"
        assert allocator.must(6, [0, 1, 2, 3, 6, 7])[2] == 5

    def test_random_allocations_keep_their_blocks_apart(self) -> None:
        """Fewer rounds than TGI's 100 000: the state machine of `test_blocks.py` goes further."""
        rng = random.Random(7)
        allocator = Allocator(1, 100)
        live: dict[int, tuple[list[int], int]] = {}
        for _ in range(3_000):
            if rng.random() < 0.2:
                for slot in [s for s in live if rng.random() < rng.choice([0.2, 1.0])]:
                    del live[slot]
                    allocator.free(slot)
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 8))]
            allocation = allocator.alloc(len(prompt) + rng.randrange(8), prompt)
            if allocation is None:
                continue
            slot, blocks, cached = allocation
            assert 0 not in blocks
            assert len(set(blocks)) == len(blocks)
            live[slot] = blocks, cached
            own = [block for blocks, cached in live.values() for block in blocks[cached:]]
            assert len(own) == len(set(own)), "two live allocations write one block"
        check_blocks(allocator.table)


class Trie:
    """TGI's trie operations on a chain of keys; returns tokens already present, as `insert` there does."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.cache = PrefixCache()
        self._next_block = 1

    def keys(self, tokens: list[int]) -> list[bytes]:
        return list(BlockHashes(self.size).first(len(tokens) // self.size, tokens, []))

    def insert(self, tokens: list[int]) -> int:
        keys = self.keys(tokens)
        found = self.cache.find(keys)
        self.cache.pin(found)
        new = []
        for key in keys[len(found) :]:
            block = self.cache.enter(key, self._next_block)
            assert block is not None
            new.append(block)
            self._next_block += 1
        self.cache.unpin([*found, *new])
        return len(found) * self.size

    def find(self, tokens: list[int]) -> int:
        """Tokens found; they count as used."""
        found = self.cache.find(self.keys(tokens))
        self.cache.pin(found)
        self.cache.unpin(found)
        return len(found) * self.size


class TestTrie:
    """9.3."""

    def test_insert_returns_the_number_of_known_tokens(self) -> None:
        trie = Trie(1)
        assert trie.insert([0, 1, 2]) == 0
        assert trie.insert([0, 1, 2]) == 3
        assert trie.insert([1, 2, 3]) == 0
        assert trie.insert([0, 1, 2, 3, 4]) == 3
        assert trie.insert([0, 1, 2, 3, 5, 6, 7]) == 4

    def test_insert_counts_whole_blocks_of_two(self) -> None:
        trie = Trie(2)
        assert trie.insert([0, 1, 2, 3]) == 0
        assert trie.insert([0, 1, 2, 3]) == 4
        assert trie.insert([1, 2, 3, 4]) == 0
        assert trie.insert([0, 1, 2, 3, 4, 5]) == 4
        assert trie.insert([0, 1, 3, 4, 5, 6, 7, 8]) == 2

    def test_find_stops_where_the_tokens_differ(self) -> None:
        trie = Trie(1)
        trie.insert([0, 1, 2, 3, 5])
        assert trie.find([0]) == 1
        assert trie.find([0, 1, 2, 3, 5]) == 5
        assert trie.find([0, 1, 2, 4]) == 3
        assert trie.find([1]) == 0

    def test_eviction_begins_with_the_least_recently_used_leaf(self) -> None:
        """The same tokens in the same order, but for the last ones: TGI goes leaf by leaf, here use decides."""
        trie = Trie(1)
        names: dict[int, int] = {}
        for tokens in ([0, 1, 2], [0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 4], [1, 2, 3]):
            first = trie._next_block
            old = trie.insert(tokens)
            names.update(zip(range(first, first + len(tokens) - old), tokens[old:], strict=True))

        def evict(count: int) -> list[int]:
            return [names[trie.cache.evict()] for _ in range(min(count, trie.cache.num_idle))]

        assert evict(1) == [7]
        assert trie.find([0, 1, 2, 3, 4]) == 5
        assert trie.find([1, 2, 3]) == 3
        assert evict(2) == [6, 5]
        assert trie.find([1, 2, 3]) == 3
        assert evict(3) == [4, 3, 2]
        assert evict(10) == [1, 0, 3, 2, 1], "fewer than asked; by use, TGI's last two come first"
