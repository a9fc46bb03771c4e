"""Row numbers on the device. The rows of a step and their groups recur in most steps."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device import transfers
from millrace_shard.device.transfers import upload

MOST_KEPT = 64


class RowIndexes:
    """Uploads columns of row numbers once, as long as they recur. The results are for reading only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[bytes, Tensor] = {}

    def __call__(self, rows: Ints) -> Tensor:
        """`rows` [n] on the device, int64."""
        if transfers.is_synchronous(self._device):
            return upload(rows, self._device)
        key = rows.tobytes()
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) == MOST_KEPT:
                self._kept.clear()
            kept = self._kept[key] = upload(rows, self._device)
        return kept
