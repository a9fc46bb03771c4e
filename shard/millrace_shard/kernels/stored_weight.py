"""A weight in the mapped files of a checkpoint, before a model has packed or copied it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.device.staged_copies import Copy, copy_directly


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [out, in], the concatenation of `parts` [n, in], for a model that computes in `dtype` on `device`.

    The parts have the dtype of the files and may be views of them. A function that takes a stored weight must have read
    it when it returns, and must not keep the parts: if a mapped file is truncated, the next access kills the process.
    """

    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    device: torch.device
    copy: Copy = copy_directly
    """Copies a part to the device."""

    @staticmethod
    def of(weight: Tensor) -> StoredWeight:
        """A stored weight of one tensor, which has the model's dtype and device."""
        return StoredWeight((weight,), weight.dtype, weight.device)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def copied(self) -> Tensor:
        """A copy [out, in] in the model's dtype and device."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        sizes = [part.shape[0] for part in self.parts]
        for rows, part in zip(torch.split(whole, sizes), self.parts, strict=True):
            self.copy(rows, part)
        return whole
