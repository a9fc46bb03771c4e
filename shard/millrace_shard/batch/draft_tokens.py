"""The draft tokens of the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.step_layout import spread
from millrace_shard.device.transfers import upload


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftTokens:
    """G tokens that may follow the last tokens of B rows; the tokens of a row are adjacent."""

    counts: Ints
    """[B]."""
    ids: Tensor
    """[G] int64 on the device, within the vocabulary."""

    @classmethod
    def none(cls, num_rows: int, device: torch.device) -> DraftTokens:
        """No draft tokens for `num_rows` rows."""
        ids = torch.empty(0, dtype=torch.int64, device=device)
        return cls(counts=np.zeros(num_rows, dtype=np.int64), ids=ids)

    @classmethod
    def of(cls, rows: list[Ints], device: torch.device) -> DraftTokens:
        """The ids of each row, which may be empty."""
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        ids = np.concatenate([*rows, np.empty(0, dtype=np.int64)])
        drafts = cls(counts=counts, ids=upload(ids, device))
        drafts.__dict__["host_ids"] = ids
        return drafts

    def __len__(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def host_ids(self) -> Ints:
        """[G] on the host; waits for the device that has computed the ids."""
        ids: Ints = self.ids.cpu().numpy()
        return ids

    def of_row(self, row: int) -> tuple[int, ...]:
        """The ids of one row, on the host."""
        end = int(self.counts[: row + 1].sum())
        return tuple(self.host_ids[end - int(self.counts[row]) : end].tolist())

    def places(self, slots: Ints, num_tokens: Ints) -> tuple[Ints, Ints]:
        """Slot and position of each draft token, where row b has `num_tokens[b]` tokens without them."""
        rows, positions = spread(num_tokens, self.counts)
        return slots[rows], positions
