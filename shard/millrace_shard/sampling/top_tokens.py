"""The likeliest tokens of rows that ask for some: a fixed number on the device, cut to the right one on the host.

How many tokens tie at the last place is known to the device alone, and nobody waits for it there: it yields a few
more than were asked for, and the host looks at the whole row in the rare case that those tie too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Floats, Ints
from millrace_shard.device.transfers import download_on_side_stream

TIE_ROOM = 16
"""Tokens beyond those asked for that may tie with the last one before the whole row is needed."""
LEAST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """Candidates of n rows, W of each."""

    rows: Ints
    """[n]."""
    wanted: Ints
    """[n], at least 1 and at most V."""
    best: Tensor
    """[2, n, W] int32: ids and bits of log probabilities, the likeliest first."""
    logprobs: Tensor
    """[n, V] float32, or [n, W] where all possible tokens are among the best."""

    @classmethod
    def of(cls, logprobs: Tensor, rows: Ints, wanted: Ints) -> TopTokens:
        """Those of `logprobs` [n, V] float32, without waiting for it; at most V of the `wanted` are given."""
        wanted = np.minimum(wanted, logprobs.shape[1])
        width = min(logprobs.shape[1], int(wanted.max()) + TIE_ROOM)
        values, ids = logprobs.topk(width, dim=-1)
        best = torch.stack([ids.to(torch.int32), values.view(torch.int32)])
        return cls(rows=rows, wanted=wanted, best=best, logprobs=logprobs)

    @classmethod
    def among(cls, ids: Tensor, logprobs: Tensor, rows: Ints, wanted: Ints) -> TopTokens:
        """Those of `ids` [n, W] int64 with `logprobs` [n, W] float32, which are all the possible tokens of a row."""
        ordered = logprobs.sort(dim=-1, descending=True)
        ids = ids.gather(1, ordered.indices).to(torch.int32)
        best = torch.stack([ids, ordered.values.view(torch.int32)])
        wanted = np.minimum(wanted, logprobs.shape[1])
        return cls(rows=rows, wanted=wanted, best=best, logprobs=ordered.values)

    def chosen(self, best: Tensor) -> tuple[Ints, Ints, Floats]:
        """Row, id and log probability of the likeliest `wanted` of each row and of all that tie with the last of them.

        Impossible tokens are never among them. `best` is the field of this name on the host, once its work is done.
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
