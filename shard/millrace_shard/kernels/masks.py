"""Bitmasks of the ids that grammars allow, applied to the rows that have a grammar."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.build import operators_loaded

BYTE_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMasks:
    """Masks of G of the R rows of a step."""

    rows: Ints
    """[G], distinct indexes among the R rows."""
    bits: Tensor
    """[G, W] int32 on the device, contiguous: bit i of word j allows id 32 j + i; ids from 32 W on are forbidden."""


class MaskTable:
    """Applies masks, by a table of the values that each byte of a mask adds to eight scores: 0 or minus infinity."""

    def __init__(self, device: torch.device) -> None:
        byte = torch.arange(1 << BYTE_BITS, device=device)[:, None]
        is_allowed = (byte >> torch.arange(BYTE_BITS, device=device)) & 1
        self._added = torch.where(is_allowed > 0, 0.0, float("-inf"))

    def forbid(self, scores: Tensor, masks: RowMasks, *, most_elements: int) -> None:
        """Set the scores [R, V] float32, contiguous, of forbidden ids to minus infinity, in place.

        NaN stays NaN, and plus infinity becomes NaN, so a failed row stays failed. Without compiled operators, at most
        `most_elements` scores, but at least one row, are processed at a time.
        """
        if scores.device.type == "cpu" and operators_loaded():
            torch.ops.millrace.forbid(scores, upload(masks.rows, scores.device), masks.bits)
            return
        size = scores.shape[1]
        height = max(1, most_elements // size)
        for start in range(0, len(masks.rows), height):
            index = upload(masks.rows[start : start + height], scores.device)
            # The lowest byte of a word comes first: all supported devices are little-endian.
            octets = masks.bits[start : start + height].view(torch.uint8)
            added = self._added.index_select(0, octets.flatten().to(torch.int32))
            added = added.view(len(octets), -1)[:, :size]
            if missing := size - added.shape[1]:
                added = torch.nn.functional.pad(added, (0, missing), value=float("-inf"))
            scores.index_add_(0, index, added)
