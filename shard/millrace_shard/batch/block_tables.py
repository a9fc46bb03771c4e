"""Which blocks hold the KV of each slot's sequence: on the host, and on the device for attention."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch_limits import BatchLimits
from millrace_shard.device.transfers import upload
from millrace_shard.errors import StepInvalid


class BlockTables:
    """A table a slot. A block that sequences share is written by none of them."""

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        size, width = limits.max_batch_size, limits.table_width
        self._limits = limits
        self._counts = np.zeros(size, dtype=np.int64)
        self._blocks = np.zeros((size, width), dtype=np.int32)
        self._num_owners = np.zeros(limits.num_blocks, dtype=np.int32)
        self.tables = torch.zeros(size + 1, width, dtype=torch.int32, device=device)
        """[slots + 1, width] on the device; the last row is the block for padding alone."""
        self.tables[size, 0] = limits.padding_block

    def clear(self) -> None:
        """Take every block back."""
        self._counts[:] = 0
        self._num_owners[:] = 0

    def drop(self, slots: Ints) -> None:
        """Take back the blocks of `slots`, each named once."""
        for slot in slots:
            np.subtract.at(self._num_owners, self.of(slot), 1)
        self._counts[slots] = 0

    def of(self, slot: int) -> NDArray[np.int32]:
        """The blocks of one sequence, in order."""
        blocks: NDArray[np.int32] = self._blocks[slot, : self._counts[slot]]
        return blocks

    def capacity(self, slots: Ints) -> Ints:
        """KV positions that there is room for in the blocks of `slots`."""
        positions: Ints = self._counts[slots] * self._limits.block_size
        return positions

    def rows(self, slots: Ints, width: int) -> NDArray[np.int32]:
        """The first `width` blocks of `slots` [B], [B, width] on the host; anything at all where there are fewer."""
        rows: NDArray[np.int32] = self._blocks[slots, :width]
        return rows

    def cache_rows(self, slots: Ints, positions: Ints) -> Ints:
        """Where in the cache the KV of a position lies: `block * block_size + offset`."""
        size = self._limits.block_size
        blocks = self._blocks[slots, positions // size].astype(np.int64)
        rows: Ints = blocks * size + positions % size
        return rows

    def grow(self, slots: Ints, blocks: Ints, num_cached: Ints) -> Ints:
        """Append `blocks[i]` to the table of `slots[i]`, whose first `num_cached[i]` positions are computed already.

        Returns those that their sequence will write. Raises StepInvalid where one of these has another owner.
        """
        if not len(slots):
            return blocks
        if blocks.min() < 1 or blocks.max() >= self._limits.num_blocks:
            raise StepInvalid(f"blocks are numbered 1 to {self._limits.num_blocks - 1}")
        columns = self._counts[slots] + _occurrence(slots)
        if columns.max() >= self._limits.table_width:
            raise StepInvalid(f"a sequence of over {self._limits.table_width} blocks")
        private = columns * self._limits.block_size >= num_cached
        distinct, places, counts = np.unique(blocks, return_inverse=True, return_counts=True)
        num_owners = self._num_owners[distinct] + counts
        if (num_owners[places[private]] > 1).any():
            raise StepInvalid("a block to be written has another owner")
        self._num_owners[distinct] = num_owners
        self._blocks[slots, columns] = blocks
        np.add.at(self._counts, slots, 1)
        index = upload(np.stack([slots, columns, blocks]), self.tables.device)
        self.tables[index[0], index[1]] = index[2].to(torch.int32)
        return blocks[private]


def _occurrence(values: NDArray[np.int64]) -> Ints:
    """For each value, how often it occurred before: [7, 3, 7, 7] gives [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    run = np.repeat(starts, np.diff(np.append(starts, len(values))))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values)) - run
    return ranks
