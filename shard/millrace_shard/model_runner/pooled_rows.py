"""The pooled rows of a step: hidden states of prompts' last tokens, or logits of some ids there."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.step import StepResult
from millrace_shard.batch.step_layout import StepLayout
from millrace_shard.device.transfers import start_download
from millrace_shard.kernels.lora.adapter_rows import AdapterRows
from millrace_shard.models.interface import CausalModel


class PooledRows:
    """Their values on the way to the host."""

    def __init__(self, parts: Many[tuple[Ints, Ints, Tensor]]) -> None:
        """Each of `parts` has slots [n], the number of values of each [n], and values [sum of them] float32."""
        self._parts = [(slots, counts, start_download(values)) for slots, counts, values in parts]

    def add_to(self, result: StepResult) -> StepResult:
        """`result` with these values; a row whose values are not finite has failed. The step must be done."""
        slots, counts, values = (
            np.concatenate(column)
            for column in zip(
                *((slots, counts, values.numpy()) for slots, counts, values in self._parts),
                strict=True,
            )
        )
        rows = np.repeat(np.arange(len(slots)), counts)
        failed = np.bincount(rows, ~np.isfinite(values), len(slots)) > 0
        return replace(
            result,
            pooled_slots=slots[~failed],
            pooled_counts=counts[~failed],
            pooled_values=values[~failed[rows]],
            failed_slots=np.concatenate([result.failed_slots, slots[failed]]),
        )


def pooled_rows(
    states: Tensor,
    model: CausalModel,
    layout: StepLayout,
    batch: Batch,
    adapters: AdapterRows | None = None,
) -> PooledRows:
    """Pool the rows of `layout.pooled`, at least one; every rank calls this with the same step.

    `states` [S, hidden] are the hidden states of `layout.state_rows`, which have these `adapters`.
    """
    slots = layout.pooled
    ids = [batch.sequences.pooled.of(slot).logit_ids for slot in slots.tolist()]
    num_ids = np.array([len(each) for each in ids], dtype=np.int64)
    parts = []
    if len(plain := np.flatnonzero(num_ids == 0)):
        values = states[batch.to_device(layout.pooled_states[plain])].float()
        counts = np.full(len(plain), values.shape[1], dtype=np.int64)
        parts.append((slots[plain], counts, values.flatten()))
    if len(scored := np.flatnonzero(num_ids)):
        places = layout.pooled_states[scored]
        own = None if adapters is None else adapters.select(places)
        logits = model.logits(states[batch.to_device(places)], own)
        counts = num_ids[scored]
        rows = np.repeat(np.arange(len(scored)), counts)
        columns = np.array([id_ for row in scored for id_ in ids[row]], dtype=np.int64)
        index = batch.to_device(np.stack([rows, columns]))
        parts.append((slots[scored], counts, logits[index[0], index[1]]))
    return PooledRows(parts)
