"""Tables by slot on the device: the token ids of each sequence, and the blocks with its KV."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device import transfers
from millrace_shard.device.transfers import upload, upload_columns
from millrace_shard.errors import StepInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Sizes that are fixed once the KV cache is allocated."""

    max_batch_size: int
    max_tokens: int
    """Longest sequence, in tokens."""
    num_blocks: int
    block_size: int
    vocab_size: int
    padding_block: int = 0
    """The block for the tokens of padding rows in CUDA graphs; no sequence owns it."""
    max_draft_tokens: int = 0
    """Draft tokens of one sequence in one step."""
    row_tile: int = 1
    """Positions of a step cost the same up to the next multiple of this number, which is equal on all ranks."""

    @property
    def table_width(self) -> int:
        """Blocks that a sequence may own.

        The router may send two steps past the end of the longest sequence and reserves their positions in full,
        although the shard computes no position past the greatest length.
        """
        return -(-(self.max_tokens + 1 + 2 * self.max_draft_tokens) // self.block_size)


class TokenTable:
    """A row for each slot, and a last row for padding.

    On CPU numpy reads and writes the same memory: a torch operation takes several times as long there, because the
    weights of each forward pass evict its code from the caches.
    """

    def __init__(self, num_slots: int, length: int, device: torch.device) -> None:
        self.table = torch.empty(num_slots + 1, length, dtype=torch.int32, device=device)
        """[slots + 1, length]; values past the end of a sequence are undefined."""
        self.table[num_slots, 0] = 0
        self._device = device
        self._host: NDArray[np.int32] | None = None
        if device.type == "cpu":
            self._host = self.table.numpy()

    @property
    def on_host(self) -> NDArray[np.int32] | None:
        """The memory of `table` if the host may read it while it launches a step, else None."""
        return self._host if transfers.is_synchronous(self._device) else None

    def begin(self, slot: int, ids: Ints) -> None:
        """Write the ids that a sequence starts with."""
        self.table[slot, : len(ids)] = upload(ids, self._device)

    def read(self, slots: Ints, positions: Ints) -> Tensor:
        """The ids at `positions` [n] of `slots` [n]: [n] int64 on the device."""
        if self._host is not None and transfers.is_synchronous(self._device):
            return torch.from_numpy(self._host[slots, positions].astype(np.int64))
        return self.take(*upload_columns([slots, positions], self._device))

    def take(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The same as `read`, with columns on the device."""
        return self.table[slots, positions].long()

    def put(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        """The same as `write`, with columns on the device."""
        self.table[slots, positions] = ids.to(torch.int32)

    def write(self, slots: Ints, positions: Ints, ids: Tensor) -> None:
        """Write `ids` [n], a tensor on the device, to `positions` [n] of `slots` [n]."""
        if self._host is not None and transfers.is_synchronous(self._device):
            self._host[slots, positions] = ids.numpy()
            return
        slot, position = upload_columns([slots, positions], self._device)
        self.put(slot, position, ids)


_NO_CHANGES: Ints = np.empty((3, 0), dtype=np.int64)


class BlockTables:
    """A block table for each slot. No sequence writes to a block that it shares."""

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        size, width = limits.max_batch_size, limits.table_width
        self._limits = limits
        self._counts = np.zeros(size, dtype=np.int64)
        self._blocks = np.zeros((size, width), dtype=np.int32)
        self._num_owners = np.zeros(limits.num_blocks, dtype=np.int32)
        self._changes = _NO_CHANGES
        """[3, n], slot, column and block of the entries that the device lacks."""
        self._tables = torch.zeros(size + 1, width, dtype=torch.int32, device=device)
        self._tables[size, 0] = limits.padding_block

    @property
    def tables(self) -> Tensor:
        """[slots + 1, width] int32 on the device, up to date; the last row has the padding block only."""
        if self._changes.size:
            self.change(upload(self.take_changes(), self._tables.device))
        return self._tables

    def take_changes(self) -> Ints:
        """[3 * n], the entries that the device lacks. The caller passes them to `change`."""
        changes, self._changes = self._changes, _NO_CHANGES
        return changes.ravel()

    def change(self, changes: Tensor) -> None:
        """Write `changes` [3 * n] int64, a copy on the device of what `take_changes` returned."""
        if len(changes):
            slots, columns, blocks = changes.view(3, -1)
            self._tables[slots, columns] = blocks.to(torch.int32)

    def clear(self) -> None:
        self._changes = _NO_CHANGES
        self._counts[:] = 0
        self._num_owners[:] = 0

    def drop(self, slots: Ints) -> None:
        """Take back the blocks of `slots`, which are distinct."""
        for slot in slots:
            np.subtract.at(self._num_owners, self.of(slot), 1)
        self._counts[slots] = 0

    def of(self, slot: int) -> NDArray[np.int32]:
        """The blocks of one sequence, in order."""
        blocks: NDArray[np.int32] = self._blocks[slot, : self._counts[slot]]
        return blocks

    def capacity(self, slots: Ints) -> Ints:
        """[n], KV positions in the blocks of each of `slots` [n]."""
        positions: Ints = self._counts[slots] * self._limits.block_size
        return positions

    def rows(self, slots: Ints, width: int) -> NDArray[np.int32]:
        """The first `width` blocks of `slots` [B]: [B, width] on the host; entries past the end are undefined."""
        rows: NDArray[np.int32] = self._blocks[slots, :width]
        return rows

    def cache_rows(self, slots: Ints, positions: Ints) -> Ints:
        """The row of each position in the cache: `block * block_size + offset`."""
        size = self._limits.block_size
        blocks = self._blocks[slots, positions // size].astype(np.int64)
        rows: Ints = blocks * size + positions % size
        return rows

    def grow(self, slots: Ints, blocks: Ints, num_cached: Ints) -> Ints:
        """Append `blocks[i]` to the table of `slots[i]`, whose first `num_cached[i]` positions have KV already.

        Only the host's tables change, so that the changes can go to the device with other columns.

        Returns the blocks that their sequence will write to. Raises StepInvalid if such a block has another owner.
        """
        if not len(slots):
            return blocks
        if blocks.min() < 1 or blocks.max() >= self._limits.num_blocks:
            raise StepInvalid(f"blocks are numbered 1 to {self._limits.num_blocks - 1}")
        columns = self._counts[slots] + _occurrence(slots)
        if columns.max() >= self._limits.table_width:
            raise StepInvalid(f"a sequence has over {self._limits.table_width} blocks")
        private = columns * self._limits.block_size >= num_cached
        distinct, index, counts = np.unique(blocks, return_inverse=True, return_counts=True)
        num_owners = self._num_owners[distinct] + counts
        if (num_owners[index[private]] > 1).any():
            raise StepInvalid("a block that its sequence will write to has another owner")
        self._num_owners[distinct] = num_owners
        self._blocks[slots, columns] = blocks
        np.add.at(self._counts, slots, 1)
        # The order of writes to one entry is undefined, so changes of an earlier step are written first.
        device = self.tables.device
        self._changes = np.stack([slots, columns, blocks])
        if transfers.is_synchronous(device):
            self.change(upload(self.take_changes(), device))
        return blocks[private]


def _occurrence(values: NDArray[np.int64]) -> Ints:
    """The number of earlier occurrences of each value: [7, 3, 7, 7] gives [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    run = np.repeat(starts, np.diff(np.append(starts, len(values))))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values)) - run
    return ranks
