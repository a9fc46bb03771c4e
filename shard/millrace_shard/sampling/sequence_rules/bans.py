"""Tokens that one sequence may not have next: changes of one row of scores, on its device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace_shard.device.transfers import upload

NEGATIVE_INFINITY = float("-inf")
NO_ID = -1
"""Stands before the beginning of a passage that is shorter than the longest one."""


class AllowedTokens:
    """The only tokens that a sequence may have."""

    def __init__(self, ids: tuple[int, ...], device: torch.device) -> None:
        self._ids = upload(np.unique(np.array(ids, dtype=np.int64)), device)

    def apply(self, line: Tensor) -> None:
        """Forbid all others in `line` [V] float32, in place."""
        kept = line[self._ids]
        line.fill_(NEGATIVE_INFINITY)
        line[self._ids] = kept


class BadWords:
    """Passages that the generated tokens of a sequence may not have."""

    def __init__(self, words: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self._width = max(map(len, words)) - 1
        beginnings = np.full((len(words), self._width), NO_ID, dtype=np.int64)
        for row, word in zip(beginnings, words, strict=True):
            row[self._width - len(word) + 1 :] = word[:-1]
        last, places = np.unique([word[-1] for word in words], return_inverse=True)
        self._beginnings = upload(beginnings, device)
        self._last = upload(last.astype(np.int64), device)
        # [distinct last ids, words]: which words end with which id.
        self._ends = upload(places[None, :] == np.arange(len(last))[:, None], device)

    def apply(self, line: Tensor, tokens: Tensor, position: Tensor, num_prompt: Tensor) -> None:
        """Forbid in `line` [V] what would complete a passage, in place.

        `tokens` [L] int32 are those of the sequence, the first `position` [] of which count; the prompt's do not.
        """
        places = position - self._width + torch.arange(self._width, device=line.device)
        recent = tokens[places.clamp(min=0)].long()
        fits = (self._beginnings == NO_ID) | ((self._beginnings == recent) & (places >= num_prompt))
        completes = (self._ends & fits.all(-1)).any(-1)
        line[self._last] = line[self._last].masked_fill(completes, NEGATIVE_INFINITY)
