"""Token ids of every sequence, by slot, on the device: sampling writes them, and the next step reads them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device import transfers
from millrace_shard.device.transfers import upload, upload_columns


class TokenTable:
    """A row for each slot, and a last row for padding.

    On CPU numpy reads and writes the same memory: a torch operation takes several times as long there, because the
    weights of each forward pass evict its code from the caches.
    """

    def __init__(self, num_slots: int, length: int, device: torch.device) -> None:
        self.table = torch.empty(num_slots + 1, length, dtype=torch.int32, device=device)
        """[slots + 1, length]; values past the end of a sequence have no meaning."""
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
        """As `read`, with columns on the device."""
        return self.table[slots, positions].long()

    def put(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        """As `write`, with columns on the device."""
        self.table[slots, positions] = ids.to(torch.int32)

    def write(self, slots: Ints, positions: Ints, ids: Tensor) -> None:
        """Write `ids` [n], a tensor on the device, to `positions` [n] of `slots` [n]."""
        if self._host is not None and transfers.is_synchronous(self._device):
            self._host[slots, positions] = ids.numpy()
            return
        slot, position = upload_columns([slots, positions], self._device)
        self.put(slot, position, ids)
