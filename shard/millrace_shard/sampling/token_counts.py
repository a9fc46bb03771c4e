"""How often each id occurs in the sequences of penalised slots, kept on the device between steps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.sampling_kernels import SamplingKernels
from millrace_shard.sampling.sampling_rows import SamplingRows
from millrace_shard.sampling.slot_parameters import PENALTIES


class TokenCounts:
    """Counts by slot, so that a step counts only the tokens since the previous one. Only the engine thread uses it.

    The table is allocated at the first use, with 8 bytes for each id of each slot.
    """

    def __init__(self, token_table: Tensor, kernels: SamplingKernels) -> None:
        """`token_table` [slots, length] int32."""
        self._table = token_table
        self._kernels = kernels
        self._counts: Tensor | None = None
        self._num_counted = np.zeros(len(token_table), dtype=np.int64)
        """[slots], the tokens of each slot that are counted; 0 means that its counts have no meaning."""

    def forget(self, slot: int) -> None:
        """Another sequence takes over `slot`."""
        self._num_counted[slot] = 0

    def penalise(self, scores: Tensor, chosen: Ints, rows: SamplingRows) -> None:
        """Penalise the rows `chosen` [n] of `scores` [R, V] float32, contiguous, in place; they are `rows`."""
        slots, places = np.unique(rows.table_rows, return_inverse=True)
        # A slot may have rows at several positions. The tokens past the first position are draft tokens, not counted.
        ends = np.full(len(slots), np.iinfo(np.int64).max)
        np.minimum.at(ends, places, rows.positions)
        prompts = rows.parameters["num_prompt"]
        num_prompt = np.empty_like(slots)
        num_prompt[places] = prompts
        counts = self._count(slots, ends, num_prompt, scores.shape[1])
        columns = np.stack([chosen, rows.table_rows, ends[places], rows.positions, prompts])
        self._kernels.penalise(
            scores, counts, self._table, upload(columns, scores.device), _penalties(rows, scores)
        )

    def _count(self, slots: Ints, ends: Ints, num_prompt: Ints, size: int) -> Tensor:
        """The counts [all slots, `size`] int64, of `slots` up to the positions `ends`, all [m]."""
        device = self._table.device
        if self._counts is None:
            self._counts = torch.empty(len(self._table), size, dtype=torch.int64, device=device)
        begins = self._num_counted[slots]
        begins[begins > ends] = 0
        if len(new := slots[begins == 0]):
            self._counts.index_fill_(0, upload(new, device), 0)
        spans = np.stack([slots, begins, ends, num_prompt])[:, begins < ends]
        if spans.shape[1]:
            longest = int((ends - begins).max())
            self._kernels.count_tokens(self._counts, self._table, upload(spans, device), longest)
        self._num_counted[slots] = ends
        return self._counts


def _penalties(rows: SamplingRows, scores: Tensor) -> Tensor:
    """[4, n] float32 on the device of `scores`."""
    if rows.device is not None:
        return rows.device.penalties()
    return upload(np.stack([rows.parameters[name] for name in PENALTIES]), scores.device)
