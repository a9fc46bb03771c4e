"""What changes scores before a token is chosen, each for the rows that ask for it, in place and in a fixed order.

Watermark, penalties, biases, the grammar's mask, and the ban on ending too soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.masks import MaskTable, RowMasks
from millrace_shard.sampling.biases import BiasTable
from millrace_shard.sampling.penalties import History, Penalties, forbid, forbid_if_others, penalise
from millrace_shard.sampling.sampling_rows import RowGroups, SamplingRows, is_counted, is_too_short
from millrace_shard.sampling.watermark import Watermark

TILE_ELEMENTS = 1 << 19
"""Scores worked on at a time on CPU, so that what each pass leaves is still in the cache for the next."""


class Processors:
    """Knows the device, the table of token histories [slots, length] int32, and the end-of-sequence ids."""

    def __init__(
        self,
        history: Tensor,
        eos_token_ids: tuple[int, ...],
        biases: BiasTable,
        watermark: Watermark,
    ) -> None:
        self._biases = biases
        self._masks = MaskTable(history.device)
        self._watermark = watermark
        self._history = history
        self._device = history.device
        self._eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=history.device)

    def apply(
        self, logits: Tensor, rows: SamplingRows, groups: RowGroups, masks: RowMasks | None
    ) -> None:
        """Change `logits` [R, V] float32, contiguous, in place."""
        if len(groups.watermarked):
            self._mark(logits, rows, groups.watermarked)
        if len(groups.penalised):
            self._penalise(logits, rows, groups.penalised)
        if len(chosen := groups.biased):
            self._biases.add(logits, chosen, rows.history_rows[chosen])
        if masks is not None and len(masks.rows):
            self._masks.forbid(logits, masks, most_elements=self._tile(logits.numel()))
        if groups.has_minimum and len(self._eos):
            self._go_on(logits, np.flatnonzero(is_too_short(rows)), masks)

    def _mark(self, logits: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        for some in self._tiles(chosen, logits.shape[1]):
            mine = rows.select(some)
            places = (self._upload(mine.history_rows), self._upload(mine.positions - 1))
            previous = self._history[places].long()
            index = self._upload(some)
            logits.index_copy_(0, index, self._watermark.apply(logits[index], previous))

    def _penalise(self, logits: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        width = max(logits.shape[1], int(rows.positions[chosen].max()))
        for some in self._tiles(chosen, width):
            mine = rows.select(some)
            p = mine.parameters
            penalties = Penalties(
                repetition=self._column(p["repetition_penalty"]),
                frequency=self._column(p["frequency_penalty"]),
                presence=self._column(p["presence_penalty"]),
                occurrence=self._column(p["openai_frequency_penalty"]),
                counts=bool(is_counted(p).any()),
            )
            penalise(logits, self._upload(some), self._history_of(mine), penalties)

    def _history_of(self, rows: SamplingRows) -> History:
        longest = int(rows.positions.max())
        ids = self._history[:, :longest].index_select(0, self._upload(rows.history_rows))
        return History(
            ids=ids.long(),
            lengths=self._column(rows.positions),
            num_prompt=self._column(rows.parameters["num_prompt"]),
        )

    def _go_on(self, logits: Tensor, chosen: Ints, masks: RowMasks | None) -> None:
        """Ban the end, unless a mask allows nothing else."""
        is_masked = np.isin(chosen, masks.rows if masks is not None else ())
        if len(free := chosen[~is_masked]):
            forbid(logits, self._upload(free), self._eos)
        if len(masked := chosen[is_masked]):
            forbid_if_others(logits, self._upload(masked), self._eos)

    def _tiles(self, rows: Ints, width: int) -> Iterator[Ints]:
        """Parts of `rows` of `width` elements each that are worked on together."""
        height = max(1, self._tile(len(rows) * width) // width)
        return (rows[start : start + height] for start in range(0, len(rows), height))

    def _tile(self, num_elements: int) -> int:
        return TILE_ELEMENTS if self._device.type == "cpu" else max(1, num_elements)

    def _upload(self, values: NDArray[Any]) -> Tensor:
        return upload(values, self._device)

    def _column(self, values: NDArray[Any]) -> Tensor:
        return upload(values, self._device)[:, None]
