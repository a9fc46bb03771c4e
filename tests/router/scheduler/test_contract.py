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

import pytest

from millrace_router.request.block_hashes import BlockHashes
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.step_plan import Budgets, StepPlan
from millrace_testing.schedules.driver import ScheduleDriver, check_blocks
from millrace_testing.shards.hash_shard import HashShard


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

    def test_a_prompt_that_is_not_aligned_is_shared_up_to_its_last_whole_block(self) -> None:
        allocator = Allocator(2, 12)
        slot, blocks, cached = allocator.must(7, [0, 1, 2])
        assert (len(blocks), cached) == (4, 0)
        allocator.free(slot)
        assert allocator.must(7, [0, 1, 2])[2] == 2

    def test_freed_blocks_are_reused_by_an_equal_prompt(self) -> None:
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

    def test_equal_prompts_share_only_computed_blocks(self) -> None:
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
        blocks = self.cache.find(keys)
        self.cache.pin(blocks)
        new = []
        for key in keys[len(blocks) :]:
            block = self.cache.enter(key, self._next_block)
            assert block is not None
            new.append(block)
            self._next_block += 1
        self.cache.unpin([*blocks, *new])
        return len(blocks) * self.size

    def find(self, tokens: list[int]) -> int:
        """Tokens found; they count as used."""
        blocks = self.cache.find(self.keys(tokens))
        self.cache.pin(blocks)
        self.cache.unpin(blocks)
        return len(blocks) * self.size


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


def new_driver(
    *,
    prefill: int = 100,
    rows: int = 16,
    num_tokens: int = 16,
    block_size: int = 1,
    max_draft_tokens: int = 0,
) -> ScheduleDriver:
    """Block size 1, no prefix cache, 16 tokens: the setting of TGI's queue tests."""
    budgets = Budgets(
        max_batch_prefill_tokens=prefill,
        max_batch_size=rows,
        reserve_all=True,
        max_draft_tokens=max_draft_tokens,
    )
    shard = HashShard(
        num_blocks=num_tokens // block_size + 1,
        block_size=block_size,
        max_batch_size=rows,
        max_draft_tokens=max_draft_tokens,
    )
    return ScheduleDriver(budgets, shard, prefix_caching=False, depth=1)


def append(driver: ScheduleDriver, *, prompt: int = 1, new: int = 1) -> None:
    driver.submit(ValidRequest(input_ids=(1,) * prompt, max_new_tokens=new))


def next_batch(driver: ScheduleDriver) -> list[int]:
    """Ids of the requests that the next step admits."""
    plan = driver.send()
    if plan is None:
        return []
    driver.receive()
    return [row.entry.request_id for row in plan.admitted]


def kinds(driver: ScheduleDriver) -> str:
    """P for each step that computed prompts, D for each that decoded, M for each that did both."""
    return "".join(kind(plan) for plan in driver.plans if plan.has_forward)


def kind(plan: StepPlan) -> str:
    if plan.chunks:
        return "M" if plan.decodes else "P"
    return "D"


class TestQueue:
    """9.1, and the steps of 2.1 that it rests on."""

    def test_entries_get_increasing_ids_from_0(self) -> None:
        driver = new_driver()
        append(driver)
        append(driver)
        assert [entry.request_id for entry in driver.waiting] == [0, 1]

    def test_nothing_comes_from_an_empty_queue(self) -> None:
        assert next_batch(new_driver()) == []

    def test_waiting_requests_join_one_batch(self) -> None:
        driver = new_driver(prefill=2)
        append(driver)
        append(driver)
        assert next_batch(driver) == [0, 1]

    def test_a_batch_holds_at_most_its_max_size(self) -> None:
        driver = new_driver(rows=1)
        append(driver)
        append(driver)
        assert next_batch(driver) == [0]
        assert len(driver.waiting) == 1

    def test_the_prefill_budget_ends_a_batch(self) -> None:
        driver = new_driver(prefill=1)
        append(driver)
        append(driver)
        assert next_batch(driver) == [0]
        driver = new_driver(prefill=3)
        for _ in range(4):
            append(driver)
        assert next_batch(driver) == [0, 1, 2]

    def test_the_last_prompt_of_a_batch_is_cut(self) -> None:
        driver = new_driver(prefill=4)
        append(driver, prompt=3)
        append(driver, prompt=3)
        assert next_batch(driver) == [0, 1]

    def test_blocks_end_a_batch_and_the_head_is_not_overtaken(self) -> None:
        """input_length + max_new_tokens - 1 positions each; the token budget is not compared."""
        driver = new_driver(num_tokens=16)
        append(driver, prompt=5, new=6)
        append(driver, prompt=5, new=6)
        append(driver)
        assert next_batch(driver) == [0]
        assert [entry.request_id for entry in driver.waiting] == [1, 2]

    @pytest.mark.parametrize(("num_tokens", "admitted"), [(5, [0]), (6, [0, 1])])
    def test_draft_tokens_are_reserved_too(self, num_tokens: int, admitted: list[int]) -> None:
        """input_length + max_new_tokens + speculate - 1 each, here 3; TGI's padded case counts as many."""
        driver = new_driver(num_tokens=num_tokens, max_draft_tokens=2)
        append(driver)
        append(driver)
        assert next_batch(driver) == admitted
        driver.run()
        driver.check_idle()

    def test_draft_tokens_keep_no_request_out_that_fits_without_them(self) -> None:
        """In TGI this request waits for ever; here there are no draft tokens beyond the last token."""
        driver = new_driver(num_tokens=16, max_draft_tokens=4)
        append(driver, prompt=5, new=12)
        assert next_batch(driver) == [0]
        assert driver.planner.blocks.num_reserved == 16
        driver.run()
        driver.check_idle()

    def test_requests_whose_clients_left_are_dropped(self) -> None:
        """TGI notices when the entry is popped; here it leaves the queue at once."""
        driver = new_driver()
        append(driver)
        driver.clients[0].leave()
        assert len(driver.waiting) == 0
        assert next_batch(driver) == []


class TestLoop:
    """2.2: prompts and decodes of a step."""

    def test_with_chunking_prompts_are_computed_together_with_decodes(self) -> None:
        driver = new_driver(num_tokens=64)
        append(driver, new=4)
        driver.turn()
        append(driver, new=2)
        driver.run()
        assert kinds(driver) == "PMDD"
        assert [plan.concat_reason for plan in driver.plans[:2]] == [None, "chunking"]

    def test_draft_tokens_do_not_turn_chunking_off(self) -> None:
        """In TGI they do; here a prompt is cut to the part of the step that decodes and draft tokens leave."""
        driver = new_driver(prefill=12, num_tokens=64, max_draft_tokens=2)
        append(driver, new=12)
        driver.turn()
        append(driver, prompt=20, new=2)
        driver.run()
        driver.check_idle()
        assert kinds(driver).startswith("PMM")
        plan = driver.plans[1]
        assert (plan.decode_tokens, plan.chunks[0][1]) == ([3], 9)
