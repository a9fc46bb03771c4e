"""Tables by slot on the device: the token ids of each sequence, and the blocks with its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.step_layout import spread
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
    """Blocks of layers without a window group, block 0 included."""
    block_size: int
    vocab_size: int
    padding_block: int = 0
    """The block for the tokens of padding rows in CUDA graphs; no sequence owns it."""
    max_draft_tokens: int = 0
    """Draft tokens of one sequence in one step."""
    second_pages: int = 0
    """Pages of states behind those that the router numbers, for steps with draft tokens."""
    windows: tuple[int, ...] = ()
    """Blocks of each window group, its reserved one included; they are numbered from the end of the group before on."""
    row_tile: int = 1
    """Positions of a step cost the same up to the next multiple of this number, which is equal on all ranks."""

    @property
    def table_width(self) -> int:
        """Blocks that a sequence may own.

        The router may send two steps past the end of the longest sequence and reserves their positions in full,
        although the shard computes no position past the greatest length.
        """
        return -(-(self.max_tokens + 1 + 2 * self.max_draft_tokens) // self.block_size)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Blocks of each group, first of layers without a window group."""
        return (self.num_blocks, *self.windows)

    @property
    def padding_blocks(self) -> tuple[int, ...]:
        """`padding_block` in each group: the one behind the router's, or the reserved one."""
        return (self.padding_block, *(self.padding_block and each for each in self.windows))


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


class Uncleared(NamedTuple):
    """What sequences are going to write to, and what is zeroed before: nothing past their positions may be read.

    With window groups, the blocks have the router's numbers, and rows of the cache count from its block 0 on.
    """

    blocks: Ints
    """[n], blocks without a position that counts."""
    rows: Ints
    """[m], rows of the cache: the other positions of blocks that begin with positions that count."""


_NO_CHANGES: Ints = np.empty((3, 0), dtype=np.int64)


class BlockTables:
    """A block table for each slot and group of layers. No sequence writes to a block that it shares.

    A group has a row for each slot, then one for padding. Entries count from the group's first block. In window
    groups the entries behind a window may have another sequence's blocks by now: no attention reads them.
    """

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        size, width, num_groups = limits.max_batch_size, limits.table_width, len(limits.group_sizes)
        self._limits = limits
        self._stride = size + 1
        self._firsts = np.cumsum([0, *limits.group_sizes])
        """The number of each group's first block, and the number after the last block."""
        self._counts = np.zeros(num_groups * self._stride, dtype=np.int64)
        self._blocks = np.zeros((num_groups * self._stride, width), dtype=np.int32)
        self._num_owners = np.zeros(limits.num_blocks, dtype=np.int32)
        self._changes = _NO_CHANGES
        """[3, n], row, column and entry that the device lacks."""
        shape = num_groups * self._stride, width
        self._tables = torch.zeros(*shape, dtype=torch.int32, device=device)
        for group, block in enumerate(limits.padding_blocks):
            self._tables[group * self._stride + size, 0] = block

    @property
    def num_groups(self) -> int:
        return len(self._firsts) - 1

    def rows_of_groups(self, slots: Tensor) -> list[Tensor]:
        """Rows of `tables` for `slots` [n] in each group."""
        return [slots, *(slots + group * self._stride for group in range(1, self.num_groups))]

    def by_group(self, numbers: Ints, unit: int = 1) -> list[Ints]:
        """Split numbers of blocks, or rows of the cache with `unit` of them a block, by group.

        The result counts from each group's first block.
        """
        if self.num_groups == 1:
            return [numbers]
        numbers = np.sort(numbers)
        bounds = np.searchsorted(numbers, self._firsts[1:-1] * unit)
        parts = np.split(numbers, bounds)
        return [part - first * unit for part, first in zip(parts, self._firsts, strict=False)]

    def begin(self, slot: int, window_starts: tuple[int, ...]) -> None:
        """The tables of a new sequence begin with entries that do not exist, so many in each window group."""
        for group, start in enumerate(window_starts, 1):
            self._counts[group * self._stride + slot] = start

    @property
    def tables(self) -> Tensor:
        """[groups * (slots + 1), width] int32 on the device, up to date; padding rows have the padding block only."""
        if self._changes.size:
            self.change(upload(self.take_changes(), self._tables.device))
        return self._tables

    @property
    def stored(self) -> Tensor:
        """`tables` as they are on the device, which may lack changes: they never move."""
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
        for group in range(self.num_groups):
            self._counts[slots + group * self._stride] = 0

    def of(self, slot: int) -> NDArray[np.int32]:
        """The blocks of one sequence in the first group, in order."""
        blocks: NDArray[np.int32] = self._blocks[slot, : self._counts[slot]]
        return blocks

    def capacity(self, slots: Ints) -> Ints:
        """[n], KV positions in the tables of each of `slots` [n]."""
        counts = self._counts[slots]
        for group in range(1, self.num_groups):
            counts = np.minimum(counts, self._counts[slots + group * self._stride])
        positions: Ints = counts * self._limits.block_size
        return positions

    def rows(self, slots: Ints, width: int, group: int = 0) -> NDArray[np.int32]:
        """The first `width` blocks of `slots` [B]: [B, width] on the host; entries past the end are undefined."""
        rows: NDArray[np.int32] = self._blocks[slots + group * self._stride, :width]
        return rows

    def cache_rows(self, slots: Ints, positions: Ints, group: int = 0) -> Ints:
        """The row of each position in the cache: `block * block_size + offset`."""
        size = self._limits.block_size
        blocks = self._blocks[slots + group * self._stride, positions // size].astype(np.int64)
        rows: Ints = blocks * size + positions % size
        return rows

    def grow(self, slots: Ints, blocks: Ints, num_cached: Ints) -> Uncleared:
        """Append `blocks[i]` to the table of `slots[i]`, whose first `num_cached[i]` positions have KV already.

        Only the host's tables change, so that the changes can go to the device with other columns.

        Raises StepInvalid if a block that its sequence will write to has another owner.
        """
        if not len(slots):
            return Uncleared(blocks, blocks)
        groups = np.searchsorted(self._firsts, blocks, side="right") - 1
        if blocks.min() < 1 or blocks.max() >= self._firsts[-1]:
            raise StepInvalid(f"blocks are numbered 1 to {self._firsts[-1] - 1}")
        table_rows, entries = slots + groups * self._stride, blocks - self._firsts[groups]
        if entries.min() < 1:
            raise StepInvalid("the first block of a group is reserved")
        columns = self._counts[table_rows] + _occurrence(table_rows)
        if columns.max() >= self._limits.table_width:
            raise StepInvalid(f"a sequence has over {self._limits.table_width} blocks")
        size = self._limits.block_size
        num_kept = np.clip(num_cached - columns * size, 0, size)
        private = num_kept < size
        # The router takes window blocks back without a message.
        owned = groups == 0
        distinct, index, counts = np.unique(blocks[owned], return_inverse=True, return_counts=True)
        num_owners = self._num_owners[distinct] + counts
        if (num_owners[index[private[owned]]] > 1).any():
            raise StepInvalid("a block that its sequence will write to has another owner")
        self._num_owners[distinct] = num_owners
        self._blocks[table_rows, columns] = entries
        np.add.at(self._counts, table_rows, 1)
        # The order of writes to one entry is undefined, so changes of an earlier step are written first.
        device = self.tables.device
        self._changes = np.stack([table_rows, columns, entries])
        if transfers.is_synchronous(device):
            self.change(upload(self.take_changes(), device))
        half = (num_kept > 0) & private
        _, rows = spread(blocks[half] * size + num_kept[half], size - num_kept[half])
        return Uncleared(blocks[num_kept == 0], rows)


def _occurrence(values: NDArray[np.int64]) -> Ints:
    """The number of earlier occurrences of each value: [7, 3, 7, 7] gives [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    run = np.repeat(starts, np.diff(np.append(starts, len(values))))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values)) - run
    return ranks
