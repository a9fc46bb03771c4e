"""Blocks of layers with a window: what is given back, what is kept for later prompts, and who may count on how many."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.factory import blocks_from
from millrace_router.scheduler.window_blocks import WindowBlocks, WindowGroup
from millrace_testing.schedules.driver import check_blocks

SIZE = 4
GROUP = WindowGroup(num_blocks=21, window=8, reach=8)
"""Two blocks of positions before a query's, so that a sequence holds up to four to go on."""
SPAN = 4


def keys(count: int, name: str = "") -> list[bytes]:
    """Keys of a chain: `name` is of the last block, or of the last ones where it has several letters."""
    common = [f"{index}".encode() for index in range(count)]
    return [
        *common[: count - len(name)],
        *(f"{name}{index}".encode() for index in range(len(name))),
    ]


class Table:
    """A block manager with one window group, and requests that compute their prompt and answer in it."""

    def __init__(self, num_blocks: int = 60, group: WindowGroup = GROUP) -> None:
        self.blocks: BlockManager = blocks_from(
            num_blocks, SIZE, prefix_caching=True, windows=[group]
        )
        self.window: WindowBlocks = self.blocks.windows[0]

    def hits(self, prompt: Sequence[bytes]) -> int:
        return len(self.blocks.find(prompt))

    def admit(self, slot: int, prompt: Sequence[bytes], *, more: int = 3) -> int:
        """Admit a prompt with one further token; the blocks that it found."""
        hits = self.blocks.find(prompt)
        num_tokens = len(prompt) * SIZE + 1
        self.blocks.admit(slot, num_tokens, hits=hits, keys=prompt, longest=num_tokens + more)
        return len(hits)

    def compute(self, slot: int, prompt: Sequence[bytes], start: int, *, chunk: int = SIZE) -> None:
        """Compute from position `start` on to the end of the prompt, each chunk answered before the next one."""
        end = len(prompt) * SIZE
        while start < end:
            start = min(start + chunk, end)
            assert self.blocks.grow(slot, start) is not None
            self.advance(slot, prompt, start)
            check_blocks(self.blocks)

    def advance(self, slot: int, prompt: Sequence[bytes], position: int) -> None:
        full = prompt[: position // SIZE]
        self.blocks.enter(slot, full)
        self.window.advance(slot, position, full)

    def serve(self, slot: int, prompt: Sequence[bytes]) -> int:
        """Admit, compute and release; the blocks that the prompt found."""
        count = self.admit(slot, prompt)
        self.compute(slot, prompt, count * SIZE)
        self.blocks.release(slot)
        check_blocks(self.blocks)
        return count

    def forget_passing(self) -> None:
        """Drop the blocks that nothing keeps, as others do that need them."""
        cache = self.window.cache
        assert cache is not None
        while cache._passing:
            self.window._free.append(cache.evict())


def test_blocks_behind_the_window_are_given_back_during_a_long_prompt() -> None:
    table, prompt = Table(), keys(40)
    table.admit(0, prompt)
    for index in range(40):
        table.compute(0, prompt[: index + 1], index * SIZE)
        assert table.window.num_owned <= SPAN
    assert table.blocks.num_owned == 40
    assert table.window.num_available == table.window.num_blocks - SPAN


def test_a_chunk_takes_only_what_others_do_not_count_on_and_returns_it() -> None:
    table = Table(num_blocks=200)
    for slot in range(3):
        table.admit(slot, keys(30, "abc"[slot]))
    others = 2 * SPAN
    assert table.window.room(0) == (table.window.num_blocks - others) * SIZE
    assert table.blocks.grow(0, table.window.room(0) + 1) is None
    count = table.window.room(0)
    assert table.blocks.grow(0, count) is not None
    assert table.window.num_available == 0
    for slot in (1, 2):
        assert table.window.room(slot) == SPAN * SIZE
        assert table.blocks.grow(slot, SPAN * SIZE) is not None
    table.advance(0, keys(30, "a"), count)
    assert table.window.room(1) > SPAN * SIZE
    check_blocks(table.blocks)


def test_no_more_sequences_are_admitted_than_can_go_on() -> None:
    table = Table(num_blocks=1000)
    fitting = table.window.num_blocks // SPAN
    for slot in range(fitting):
        assert table.blocks.window_shortage(100) <= 0
        table.admit(slot, keys(10, "x" * (slot + 1)))
    assert table.blocks.window_shortage(100) == SPAN
    with pytest.raises(ValueError, match="cannot promise"):
        table.admit(fitting, keys(10, "y"))
    table.blocks.release(0)
    assert table.blocks.window_shortage(100) <= 0


def test_a_prompt_finds_the_tail_of_an_equal_one_and_of_one_that_parts_from_its_end() -> None:
    table = Table()
    table.serve(0, keys(12))
    table.forget_passing()
    assert table.hits(keys(12)) == 12
    assert table.hits(keys(12)[:11]) == 11
    assert table.hits([*keys(12), b"next", b"turn"]) == 12
    assert table.hits(keys(12)[:6]) == 0


def test_the_second_prompt_that_parts_from_a_chain_keeps_the_tail_for_the_third() -> None:
    table = Table()
    assert table.serve(0, keys(12, "abcdef")) == 0
    table.forget_passing()
    assert table.serve(0, keys(12, "ghijkl")) == 0
    table.forget_passing()
    assert table.serve(0, keys(12, "mnopqr")) == 6


def test_blocks_that_nothing_keeps_are_found_while_there_is_room() -> None:
    table = Table()
    table.serve(0, keys(12, "abcdef"))
    assert table.hits(keys(12, "ghijkl")) == 6


def test_a_long_prompt_keeps_a_tail_after_every_sixteen_lengths_of_one() -> None:
    table = Table(num_blocks=200, group=WindowGroup(num_blocks=61, window=8, reach=8))
    table.serve(0, keys(100))
    table.forget_passing()
    found = [count for count in range(1, 101) if table.hits(keys(100)[:count]) == count]
    assert found == [47, 48, 95, 96, 99, 100]


def test_blocks_that_nothing_keeps_are_evicted_before_tails() -> None:
    table = Table(num_blocks=200)
    table.serve(0, keys(12, "a"))
    for number in range(3):
        table.serve(0, keys(30, "x" * (20 + number)))
    assert table.hits(keys(12, "a")) == 12


def test_a_sequence_goes_on_in_what_it_has_parked() -> None:
    table, prompt = Table(), keys(12)
    table.admit(0, prompt, more=20)
    table.compute(0, prompt, 0)
    assert table.blocks.grow(0, 50) is not None
    table.advance(0, prompt, 50)
    held = table.window.park(0, 50)
    first = table.window.first_needed(50)
    assert held.first <= first < held.end == 13
    assert table.window.num_available == table.window.num_blocks - len(held.blocks)
    assert table.window.unpark(0, held, 70, 12) == held.blocks
    assert table.window.num_available == table.window.num_blocks - SPAN


def test_the_numbers_of_groups_follow_each_other() -> None:
    blocks = blocks_from(10, SIZE, prefix_caching=True, windows=[GROUP, GROUP])
    grown = blocks.admit(0, 8, longest=8)
    assert grown == []
    assert blocks.grow(0, 8) == [1, 2, 11, 12, 32, 33]


def test_the_usage_is_that_of_the_fullest_group() -> None:
    table = Table(num_blocks=1001)
    assert table.blocks.usage == 0.0
    table.admit(0, keys(2))
    table.compute(0, keys(2), 0)
    assert table.blocks.usage == 2 / 20
