"""Scores of prompt tokens that are computed one chunk before they are reported, by slot."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints

UNKNOWN = 0x7FC00000
"""The bits of a float32 that is not a number."""


class PendingScores:
    """A token is scored by the position before it, so the last score of a chunk waits for the next chunk.

    A score is a row of pairs of int32, an id and the bits of its log probability: first the token itself, whose id
    has no meaning, then its candidates, the likeliest first.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.num_candidates: Ints = np.zeros(size, dtype=np.int64)
        """[size], candidates that each slot reports."""
        self._table = torch.zeros(size, 1, 2, dtype=torch.int32, device=device)

    def admit(self, slot: int, num_candidates: int) -> None:
        """Start a prompt, whose first token has no score."""
        self.num_candidates[slot] = num_candidates
        missing = 1 + num_candidates - self._table.shape[1]
        if missing > 0:
            wider = self._table.new_zeros(len(self._table), missing, 2)
            self._table = torch.cat([self._table, wider], dim=1)
        self._table[slot, :, 0] = 0
        self._table[slot, :, 1] = UNKNOWN

    def exchange(self, slots: Tensor, scores: Tensor) -> Tensor:
        """Store `scores` [n, 1 + W, 2] for `slots` [n], and return the scores stored earlier, as wide."""
        width = scores.shape[1]
        kept = self._table[slots, :width]
        self._table[slots, :width] = scores
        return kept
