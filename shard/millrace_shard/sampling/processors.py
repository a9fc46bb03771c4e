"""Logits processors, applied in place and in a fixed order, each to the rows that use it.

The order is: watermark, penalties, biases, rules of sequences, the grammar's mask, and the minimum of new tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.scores import MaskTable, RowMasks, SamplingKernels
from millrace_shard.sampling.penalties import (
    BiasTable,
    PastTokens,
    Penalties,
    TokenCounts,
    forbid,
    forbid_if_others,
    penalise,
)
from millrace_shard.sampling.sampling_rows import (
    RowGroups,
    RowIndexes,
    SamplingRows,
    is_counted,
    is_too_short,
    tile_height,
    tiles,
)
from millrace_shard.sampling.sequence_rules import RuleTable
from millrace_shard.sampling.watermark import Watermark


class Processors:
    """Logits processors over the token table [slots, length] int32, whose device they work on."""

    def __init__(
        self,
        token_table: Tensor,
        eos_token_ids: tuple[int, ...],
        biases: BiasTable,
        watermark: Watermark,
        kernels: SamplingKernels | None,
    ) -> None:
        self._biases = biases
        self.rules = RuleTable(token_table)

        self._masks = MaskTable(token_table.device)
        self._watermark = watermark
        self._token_table = token_table
        self._device = token_table.device
        self._index = RowIndexes(token_table.device)
        self.counts = None if kernels is None else TokenCounts(token_table, kernels)
        """None: every step counts the tokens of whole sequences."""
        self._eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=token_table.device)

    def apply(
        self, logits: Tensor, rows: SamplingRows, groups: RowGroups, masks: RowMasks | None
    ) -> None:
        """Change `logits` [R, V] float32, contiguous, in place."""
        if len(groups.watermarked):
            self._apply_watermark(logits, rows, groups.watermarked)
        if len(groups.penalised):
            self._penalise(logits, rows, groups.penalised)
        if len(chosen := groups.biased):
            self._biases.add(logits, chosen, rows.table_rows[chosen])
        if len(groups.ruled):
            self.rules.apply(logits, rows, groups.ruled)
        if masks is not None and len(masks.rows):
            most = tile_height(self._device, logits.shape[1]) * logits.shape[1]
            self._masks.forbid(logits, masks, most_elements=most)
        if groups.has_minimum and len(self._eos):
            self._forbid_ending(logits, np.flatnonzero(is_too_short(rows)), masks)

    def _apply_watermark(self, logits: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        for some in tiles(chosen, self._device, logits.shape[1]):
            previous = self._token_table[self._last_tokens(rows.select(some))].long()
            index = self._index(some)
            logits.index_copy_(0, index, self._watermark.apply(logits[index], previous))

    def _last_tokens(self, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Slots and positions of the rows' last tokens, an index into the token table."""
        if rows.device is not None:
            return rows.device.slots, rows.device.positions - 1
        return upload(rows.table_rows, self._device), upload(rows.positions - 1, self._device)

    def _penalise(self, logits: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        if self.counts is not None:
            self.counts.penalise(logits, chosen, rows.select(chosen))
            return
        width = max(logits.shape[1], int(rows.positions[chosen].max()))
        for some in tiles(chosen, self._device, width):
            tile_rows = rows.select(some)
            penalties = Penalties(
                repetition=tile_rows.column("repetition_penalty", self._device),
                frequency=tile_rows.column("frequency_penalty", self._device),
                presence=tile_rows.column("presence_penalty", self._device),
                openai_frequency=tile_rows.column("openai_frequency_penalty", self._device),
                uses_counts=bool(is_counted(tile_rows.parameters).any()),
            )
            penalise(logits, self._index(some), self._past_tokens(tile_rows), penalties)

    def _past_tokens(self, rows: SamplingRows) -> PastTokens:
        longest = int(rows.positions.max())
        if rows.device is None:
            slots, positions = (
                upload(rows.table_rows, self._device),
                upload(rows.positions, self._device),
            )
        else:
            slots, positions = rows.device.slots, rows.device.positions
        ids = self._token_table[:, :longest].index_select(0, slots)
        return PastTokens(
            ids=ids.long(),
            lengths=positions[:, None],
            num_prompt=rows.column("num_prompt", self._device),
        )

    def _forbid_ending(self, logits: Tensor, chosen: Ints, masks: RowMasks | None) -> None:
        """Forbid the end-of-sequence ids, except where a mask allows nothing else."""
        is_masked = np.isin(chosen, masks.rows if masks is not None else ())
        if len(free := chosen[~is_masked]):
            forbid(logits, self._index(free), self._eos)
        if len(masked := chosen[is_masked]):
            forbid_if_others(logits, self._index(masked), self._eos)
