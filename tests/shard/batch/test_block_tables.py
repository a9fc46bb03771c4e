"""Changes of block tables, which may go to the device after the host has made them."""

from __future__ import annotations

import pytest
import torch

from millrace_shard.arrays import Ints
from millrace_shard.batch.device_tables import BatchLimits, BlockTables
from millrace_shard.device import transfers
from millrace_testing.engines.steps import ints

LIMITS = BatchLimits(
    max_batch_size=3,
    max_tokens=63,
    num_blocks=20,
    block_size=16,
    vocab_size=9,
    padding_block=20,
)


@pytest.fixture(params=[True, False], ids=["at once", "later"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BlockTables:
    monkeypatch.setattr(transfers, "is_synchronous", lambda _: request.param)
    return BlockTables(LIMITS, torch.device("cpu"))


def grow(tables: BlockTables, slots: list[int], blocks: list[int]) -> Ints:
    return tables.grow(ints(slots), ints(blocks), ints([0] * len(slots)))


def test_readers_see_all_changes(tables: BlockTables) -> None:
    grow(tables, [1, 1, 0], [5, 6, 7])
    assert tables.tables[:, :3].tolist() == [[7, 0, 0], [5, 6, 0], [0, 0, 0], [20, 0, 0]]
    grow(tables, [1], [8])
    assert tables.tables[1].tolist() == [5, 6, 8, 0]


def test_the_last_change_of_an_entry_counts(tables: BlockTables) -> None:
    """A slot changes hands before the device has seen its former blocks."""
    grow(tables, [0, 0], [1, 2])
    tables.drop(ints([0]))
    grow(tables, [0, 0], [9, 10])
    assert tables.tables[0, :2].tolist() == [9, 10]


def test_changes_are_taken_once(tables: BlockTables) -> None:
    grow(tables, [2, 0], [3, 4])
    changes = tables.take_changes()
    assert not len(tables.take_changes())
    tables.change(torch.from_numpy(changes))
    assert tables.tables[:, 0].tolist() == [4, 0, 3, 20]


def test_an_epoch_leaves_no_changes(tables: BlockTables) -> None:
    grow(tables, [0], [3])
    tables.clear()
    assert not len(tables.take_changes())
