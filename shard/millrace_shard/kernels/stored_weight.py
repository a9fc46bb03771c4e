"""A weight in the mapped files of a checkpoint, before a model has packed or copied it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.device.transfers import Copy, copy_directly
from millrace_shard.kernels.quantized import QuantizedTensor

ELEMENTS_PER_PASS = 1 << 18
"""Elements that are widened to float32 at a time: intermediate tensors stay in the cache."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [out, in], the concatenation of `parts` [n, in], for a model that computes in `dtype` on `device`.

    The parts are tensors in the dtype of the files, or codes with scales, and may be views of the files. A function
    that takes a stored weight must have read it when it returns, and must not keep the parts: if a mapped file is
    truncated, the next access kills the process.
    """

    parts: tuple[Tensor | QuantizedTensor, ...]
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
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...] | None:
        """The parts, if all are tensors of the model's dtype."""
        tensors = tuple(part for part in self.parts if isinstance(part, Tensor))
        is_whole = len(tensors) == len(self.parts)
        return tensors if is_whole and all(part.dtype is self.dtype for part in tensors) else None

    def copied(self) -> Tensor:
        """A copy [out, in] in the model's dtype and device; codes are multiplied in float32, then rounded once."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        sizes = [part.shape[0] for part in self.parts]
        for rows, part in zip(torch.split(whole, sizes), self.parts, strict=True):
            if isinstance(part, Tensor):
                self.copy(rows, part)
            else:
                self._copy_codes(rows, part)
        return whole

    def _copy_codes(self, out: Tensor, part: QuantizedTensor) -> None:
        step = max(1, ELEMENTS_PER_PASS // part.shape[1])
        for start in range(0, part.shape[0], step):
            piece = part.rows(start, min(start + step, part.shape[0]))
            self.copy(out[start : start + step], piece.dequantized())
