"""The adapters of the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload

BLOCK_ROWS = 16
"""Rows of a block of `AdapterRows.blocks`."""


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """The rows of one adapter."""

    slot: int
    """Its adapter slot, at least 1."""
    rows: Tensor
    """[n] int64 on the device, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterRows:
    """The adapter slot of each of T rows, at least one of which has an adapter. It outlives the step."""

    host: Ints
    """[T], the adapter slot of each row; 0 for rows of the base model."""
    slots: Tensor
    """[T] int32 on the device: `host`, as operators take it in `lora_rows`."""
    groups: tuple[AdapterGroup, ...]
    """The rows of each adapter, by ascending slot."""
    blocks: Tensor
    """[N, 1 + BLOCK_ROWS] int32 on the device: an adapter slot, then rows that have it, -1 in the end.

    A block of zeros has no adapter.
    """
    logits: AdapterRows | None
    """The same for the rows whose logits are needed; None if none of them has an adapter."""

    @staticmethod
    def of(
        host: Ints, device: torch.device, *, logit_rows: Ints | None = None
    ) -> AdapterRows | None:
        """Rows with the adapter slots `host` [T], of which `logit_rows` need logits, or all; None without adapters."""
        if not host.any():
            return None
        groups = tuple(
            AdapterGroup(int(slot), upload(np.flatnonzero(host == slot), device))
            for slot in np.unique(host[host > 0])
        )
        slots = upload(host.astype(np.int32), device)
        blocks = upload(_blocks(host), device)
        alone = AdapterRows(host=host, slots=slots, groups=groups, blocks=blocks, logits=None)
        logits = alone if logit_rows is None else AdapterRows.of(host[logit_rows], device)
        return replace(alone, logits=logits)

    def select(self, rows: Ints) -> AdapterRows | None:
        """The adapters of `rows` [n] of these rows; None if none of them has one."""
        return AdapterRows.of(self.host[rows], self.slots.device)


def most_blocks(num_rows: int, max_adapters: int) -> int:
    """The most blocks that `num_rows` rows of at most `max_adapters` adapters have."""
    return min(num_rows, num_rows // BLOCK_ROWS + max_adapters)


def _blocks(host: Ints) -> NDArray[np.int32]:
    """The blocks of rows with the adapter slots `host`."""
    rows = np.flatnonzero(host)
    rows = rows[np.argsort(host[rows], kind="stable")]
    slots, starts, counts = np.unique(host[rows], return_index=True, return_counts=True)
    num_blocks = -(-counts // BLOCK_ROWS)
    ends = np.cumsum(num_blocks)
    within = np.arange(len(rows)) - np.repeat(starts, counts)
    block = np.repeat(ends - num_blocks, counts) + within // BLOCK_ROWS
    blocks = np.full((ends[-1], 1 + BLOCK_ROWS), -1, dtype=np.int32)
    blocks[:, 0] = np.repeat(slots, num_blocks)
    blocks[block, 1 + within % BLOCK_ROWS] = rows
    return blocks
