"""Kept blocks are used only if every rank's directory says of each what the router has recorded of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from millrace_router.scheduler.block_ledger import (
    BlockLedger,
    StoredBlock,
    StoredBlocks,
    new_life,
)
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.prefix_cache import PrefixCache

LIFE, SIZE = 5, 4
KEYS = [bytes([number]) * 32 for number in range(8)]


class Directory:
    """What a shard writes down."""

    def __init__(self, life: int = LIFE) -> None:
        self.life = life
        self.blocks: dict[int, StoredBlock] = {}

    def follow(
        self, ledger: BlockLedger, handed_out: Mapping[int, int], *, executes: bool = True
    ) -> None:
        """Take the changes of a step, which the shard executes or not."""
        seals = ledger.take_seals()
        if not executes:
            return
        for block in seals.unsealed:
            if block in self.blocks:
                self.blocks[block] = self.blocks[block]._replace(key=b"")
        for block, key in seals.sealed.items():
            self.blocks[block] = self.blocks[block]._replace(key=key)
        for block, owner in handed_out.items():
            self.blocks[block] = StoredBlock(owner, ledger.generation, b"")

    def read(self) -> StoredBlocks:
        return StoredBlocks(self.life, dict(self.blocks))


def settled(
    change: Callable[[dict[int, StoredBlock]], None], *, second_rank: bool = False
) -> str | None:
    """The verdict on two sealed blocks of request 7 and an open one of request 8, after `change` of the directory."""
    ledger, directory = BlockLedger(LIFE), Directory()
    ledger.generation = 1001
    ledger.hand_out([1, 2], 7)
    directory.follow(ledger, {1: 7, 2: 7})
    ledger.seal(1, KEYS[1])
    ledger.seal(2, KEYS[2])
    ledger.generation = 1002
    ledger.hand_out([3], 8)
    directory.follow(ledger, {3: 8})
    good = directory.read()
    change(directory.blocks)
    ranks = [good, directory.read()] if second_rank else [directory.read()]
    return ledger.settle(ranks, {1: KEYS[1], 2: KEYS[2], 3: None})


def test_a_directory_that_says_the_same_is_taken() -> None:
    assert settled(lambda blocks: None) is None


def swap(blocks: dict[int, StoredBlock]) -> None:
    blocks[1], blocks[2] = blocks[2], blocks[1]


def swap_unlike(blocks: dict[int, StoredBlock]) -> None:
    blocks[1], blocks[3] = blocks[3], blocks[1]


def age(blocks: dict[int, StoredBlock]) -> None:
    blocks[3] = blocks[3]._replace(generation=1001)


def steal(blocks: dict[int, StoredBlock]) -> None:
    blocks[3] = blocks[3]._replace(owner=7)


def lose(blocks: dict[int, StoredBlock]) -> None:
    del blocks[3]


def rename(blocks: dict[int, StoredBlock]) -> None:
    blocks[2] = blocks[2]._replace(key=KEYS[4])


@pytest.mark.parametrize("second_rank", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (swap, "key"),
        (swap_unlike, "entry"),
        (age, "entry"),
        (steal, "entry"),
        (lose, "entry"),
        (rename, "key"),
    ],
)
def test_a_directory_of_any_rank_that_says_something_else_is_not(
    change: Callable[[dict[int, StoredBlock]], None], reason: str, second_rank: bool
) -> None:
    assert settled(change, second_rank=second_rank) == reason


@pytest.mark.parametrize(("life", "reason"), [(0, "empty"), (LIFE + 1, "life")])
def test_a_directory_of_other_books_is_not_taken(life: int, reason: str) -> None:
    stored = StoredBlocks(life, {})
    assert BlockLedger(LIFE).settle([StoredBlocks(LIFE, {}), stored], {}) == reason


def test_what_is_free_is_not_compared() -> None:
    ledger = BlockLedger(LIFE)
    other = StoredBlocks(LIFE, {9: StoredBlock(1, 2, b"")})
    assert ledger.settle([other], {}) is None
    assert not ledger.take_seals()


def test_a_key_that_only_a_rank_still_has_is_unsealed() -> None:
    ledger, ranks = BlockLedger(LIFE), [Directory(), Directory()]
    ledger.hand_out([1, 2], 7)
    for rank in ranks:
        rank.blocks = {block: StoredBlock(7, 0, KEYS[block]) for block in (1, 2)}
    ranks[1].blocks[1] = StoredBlock(7, 0, b"")
    ledger.unseal(1)
    assert ledger.settle([rank.read() for rank in ranks], {1: None, 2: KEYS[2]}) is None
    seals = ledger.take_seals()
    assert (seals.unsealed, seals.sealed) == ([1], {})
    ranks[0].blocks[1] = StoredBlock(8, 0, KEYS[1])
    assert ledger.settle([rank.read() for rank in ranks], {1: None, 2: KEYS[2]}) == "entry"


def manager() -> tuple[BlockManager, BlockLedger]:
    ledger = BlockLedger(LIFE)
    return BlockManager(12, SIZE, PrefixCache(), ledger), ledger


def hand_out(blocks: BlockManager, slot: int, owner: int, count: int) -> dict[int, int]:
    """Let `slot` have `count` blocks of `owner` in the next step."""
    ledger = blocks.ledger
    assert ledger is not None
    ledger.generation += 1
    blocks.admit(slot, count * SIZE)
    new = blocks.grow(slot, count * SIZE)
    assert new is not None
    ledger.hand_out(new, owner)
    return dict.fromkeys(new, owner)


@pytest.mark.parametrize("executes", [False, True])
def test_seals_of_an_unanswered_step_are_sent_again_if_a_rank_lacks_them(*, executes: bool) -> None:
    blocks, ledger = manager()
    ranks = [Directory(), Directory()]
    handed_out = hand_out(blocks, 0, 40, 3)
    ranks[0].follow(ledger, handed_out)
    ranks[1].follow(ledger, handed_out)
    blocks.enter(0, KEYS[:2])
    seals = ledger.take_seals()
    assert seals.sealed == dict(zip(handed_out, KEYS[:2], strict=False))
    for rank in ranks[: 1 + executes]:
        for block, key in seals.sealed.items():
            rank.blocks[block] = rank.blocks[block]._replace(key=key)
    blocks.release(0)
    assert blocks.settle([rank.read() for rank in ranks]) is None
    assert ledger.take_seals().sealed == ({} if executes else seals.sealed)


def test_a_block_that_lost_its_key_is_unsealed() -> None:
    blocks, ledger = manager()
    directory = Directory()
    directory.follow(ledger, hand_out(blocks, 0, 40, 2))
    blocks.enter(0, KEYS[:2])
    directory.follow(ledger, {})
    blocks.forget(0)
    assert ledger.take_seals().unsealed == list(directory.blocks)
    # That step was not executed: the directory still has the keys of blocks that are free now.
    blocks.release(0)
    assert blocks.settle([directory.read()]) is None
    assert sorted(ledger.take_seals().unsealed) == sorted(directory.blocks)


def test_a_seal_that_was_not_sent_needs_no_unsealing() -> None:
    blocks, ledger = manager()
    hand_out(blocks, 0, 40, 2)
    blocks.enter(0, KEYS[:1])
    blocks.forget(0)
    assert not ledger.take_seals()


def test_an_evicted_block_is_handed_out_without_its_seal() -> None:
    blocks, ledger = manager()
    hand_out(blocks, 0, 40, 11)
    blocks.enter(0, KEYS[:2])
    blocks.release(0)
    hand_out(blocks, 1, 41, 11)
    assert not ledger.take_seals().sealed


def test_without_a_ledger_nothing_is_taken() -> None:
    assert BlockManager(12, SIZE).settle([StoredBlocks(LIFE, {})]) == "life"


MARK = 77


def left_by_a_router(*, mark: int = MARK) -> tuple[StoredBlocks, int]:
    """A directory with three sealed blocks and an open one, and the number of its life."""
    life = new_life(mark)
    blocks = {
        1: StoredBlock(7, 1001, KEYS[1]),
        2: StoredBlock(7, 1003, KEYS[2]),
        4: StoredBlock(8, 1002, KEYS[4]),
        5: StoredBlock(8, 1004, b""),
    }
    return StoredBlocks(life, blocks), life


def test_sealed_blocks_become_the_prefix_cache_of_the_next_router() -> None:
    stored, life = left_by_a_router()
    ledger = BlockLedger(new_life(MARK))
    blocks = BlockManager(6, SIZE, PrefixCache(), ledger)
    assert blocks.adopt([stored, stored], MARK) == 3
    assert ledger.life == life
    assert [hit.block for hit in blocks.find([KEYS[1], KEYS[2]])] == [1, 2]
    assert (blocks.num_free, blocks.num_cached, blocks.num_owned) == (2, 3, 0)
    assert blocks.settle([stored, stored]) is None
    # The blocks without a key first, then the end of the sequence that has grown least recently.
    blocks.admit(0, 4 * SIZE)
    assert blocks.grow(0, 4 * SIZE) == [3, 5, 4, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: StoredBlocks(stored.life + (1 << 32), stored.blocks),
        lambda stored: StoredBlocks(0, stored.blocks),
        lambda stored: StoredBlocks(
            stored.life, {**stored.blocks, 2: StoredBlock(7, 1003, KEYS[5])}
        ),
        lambda stored: StoredBlocks(
            stored.life, {**stored.blocks, 2: StoredBlock(9, 1003, KEYS[2])}
        ),
    ],
)
def test_nothing_is_taken_from_directories_that_contradict_each_other(
    change: Callable[[StoredBlocks], StoredBlocks],
) -> None:
    stored, _ = left_by_a_router()
    blocks = BlockManager(6, SIZE, PrefixCache(), BlockLedger(new_life(MARK)))
    assert blocks.adopt([stored, change(stored)], MARK) == 0
    assert (blocks.num_free, blocks.find([KEYS[1]])) == (5, [])


def test_blocks_of_another_model_or_with_a_seal_on_one_rank_only_are_not_taken() -> None:
    stored, life = left_by_a_router()
    others = left_by_a_router(mark=MARK + 1)[0]
    blocks = BlockManager(6, SIZE, PrefixCache(), BlockLedger(new_life(MARK)))
    assert blocks.adopt([others], MARK) == 0
    partly = StoredBlocks(life, {**stored.blocks, 2: StoredBlock(9, 1005, b"")})
    assert blocks.adopt([stored, partly], MARK) == 2
    assert [hit.block for hit in blocks.find([KEYS[1], KEYS[2]])] == [1]
