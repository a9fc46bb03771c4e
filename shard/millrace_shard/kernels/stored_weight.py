"""A weight where it lies before a model has it: in the mapped files of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [out, in]: `parts` [n, in] one under another, for a model that computes in `dtype` on `device`.

    The parts are in the files' dtype and may be views of them. Whoever is given them has read them when the call
    returns, and keeps nothing of them: a file that somebody makes shorter is fatal to those that have it mapped.
    """

    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(weight: Tensor) -> StoredWeight:
        """All of it in one tensor, as the model wants it."""
        return StoredWeight((weight,), weight.dtype, weight.device)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def kept(self) -> Tensor:
        """[out, in] in memory of its own."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        sizes = [part.shape[0] for part in self.parts]
        for rows, part in zip(torch.split(whole, sizes), self.parts, strict=True):
            rows.copy_(part)
        return whole
