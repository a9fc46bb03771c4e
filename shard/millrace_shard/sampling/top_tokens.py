"""The top tokens of rows that request them: a fixed number on the device, reduced to the right number on the host.

The number of tokens that tie at the last place is on the device, and the host must not wait for it. The device
therefore returns a few tokens more than requested; the host reads the whole row in the rare case that all of these tie.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Floats, Ints
from millrace_shard.device.transfers import download_on_side_stream

TIE_ROOM = 16
"""Tokens beyond the requested ones that may tie with the last one before the whole row is read."""
LEAST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """The W best tokens of each of n rows."""

    rows: Ints
    """[n]."""
    wanted: Ints
    """[n], at least 1 and at most V."""
    best: Tensor
    """[2, n, W] int32: ids and bits of log probabilities, the most likely first."""
    logprobs: Tensor
    """[n, V] float32, or [n, W] where `best` holds all possible tokens."""

    @classmethod
    def of(cls, logprobs: Tensor, rows: Ints, wanted: Ints) -> TopTokens:
        """The top tokens of `logprobs` [n, V] float32, without a wait for the device; `wanted` is limited to V."""
        wanted = np.minimum(wanted, logprobs.shape[1])
        width = min(logprobs.shape[1], int(wanted.max()) + TIE_ROOM)
        values, ids = logprobs.topk(width, dim=-1)
        best = torch.stack([ids.to(torch.int32), values.view(torch.int32)])
        return cls(rows=rows, wanted=wanted, best=best, logprobs=logprobs)

    @classmethod
    def among(cls, ids: Tensor, logprobs: Tensor, rows: Ints, wanted: Ints) -> TopTokens:
        """The top tokens among `ids` [n, W] int64 with `logprobs` [n, W] float32, all possible tokens of each row."""
        ordered = logprobs.sort(dim=-1, descending=True)
        ids = ids.gather(1, ordered.indices).to(torch.int32)
        best = torch.stack([ids, ordered.values.view(torch.int32)])
        wanted = np.minimum(wanted, logprobs.shape[1])
        return cls(rows=rows, wanted=wanted, best=best, logprobs=ordered.values)

    def chosen(self, best: Tensor) -> tuple[Ints, Ints, Floats]:
        """Row, id and log probability of the `wanted` best tokens of each row, and of all that tie with the last one.

        Impossible tokens are excluded. `best` is the host copy of the field of this name.
        """
        ids, bits = best.numpy()
        values = bits.view(np.float32)
        n, width = values.shape
        last = np.maximum(values[np.arange(n), self.wanted - 1], LEAST)[:, None]
        is_chosen = values >= last
        may_tie_on = is_chosen[:, -1] & (width < self.logprobs.shape[1])
        overflows = np.flatnonzero(may_tie_on)
        is_chosen[overflows] = False
        owners, columns = np.nonzero(is_chosen)
        parts = [(self.rows[owners], ids[owners, columns], values[owners, columns])]
        for place in overflows:
            whole = download_on_side_stream(self.logprobs[place])
            tied = np.flatnonzero(whole >= last[place])
            parts.append((np.full(len(tied), self.rows[place]), tied, whole[tied]))
        rows, tokens, logprobs = (np.concatenate(column) for column in zip(*parts, strict=True))
        return rows, tokens.astype(np.int64), logprobs
