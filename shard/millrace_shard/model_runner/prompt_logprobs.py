"""Log probabilities of prompt tokens and of the likeliest tokens in their places, from raw logits, chunk by chunk.

The hidden states of a prompt become logits in slices of positions, of which only the scores are kept. So the memory
does not depend on the length of prompts: it holds `SLICE_ELEMENTS` logits, as many log probabilities, and the buffers
of head and `topk`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.step import StepResult
from millrace_shard.batch.step_layout import StepLayout
from millrace_shard.kernels.lora.adapter_rows import AdapterRows
from millrace_shard.kernels.row_alignment import aligned
from millrace_shard.models.interface import CausalModel

SLICE_ELEMENTS = 1 << 24
"""Logits in a slice: 64 MiB of float32, or the logits of one position if these are more."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Scores of the prompt tokens that a step has computed: `counts[i]` tokens, with candidates, for `slots[i]`."""

    slots: Ints
    counts: Ints
    num_candidates: Ints
    """Candidates that each slot reports for each of its tokens."""
    scores: Tensor
    """[sum of counts, 1 + W, 2] int32 on the device, as in PendingScores; W is the largest number of candidates."""

    def add_to(self, result: StepResult, scores: Tensor) -> StepResult:
        """`result` with these columns; `scores` is the field of this name, copied to the host."""
        ids, bits = scores.numpy()[..., 0], scores.numpy()[..., 1]
        logprobs = bits.view(np.float32)
        result = replace(
            result,
            prefill_slots=self.slots,
            prefill_counts=self.counts,
            prefill_logprobs=logprobs[:, 0],
        )
        if not self.num_candidates.any():
            return result
        requested = np.repeat(self.num_candidates, self.counts)
        is_requested = np.arange(ids.shape[1] - 1) < requested[:, None]
        return replace(
            result,
            prefill_top_counts=self.num_candidates,
            prefill_top_ids=ids[:, 1:][is_requested].astype(np.int64),
            prefill_top_logprobs=logprobs[:, 1:][is_requested],
        )


def prompt_logprobs(
    states: Tensor,
    model: CausalModel,
    layout: StepLayout,
    batch: Batch,
    adapters: AdapterRows | None = None,
) -> PromptLogprobs:
    """Score the prompts of `layout.prompt_rows`, at least one; every rank calls this with the same step.

    `states` [S, hidden] are the hidden states of `layout.state_rows`, which have these `adapters`.
    """
    rows = layout.prompt_rows
    slots, counts = layout.slots[rows], layout.counts[rows]
    num_candidates = batch.pending_scores.num_candidates[slots]
    token_slots = np.repeat(slots, counts)
    index = batch.to_device(np.stack([token_slots, layout.prompt_targets, layout.prompt_states]))
    targets = batch.token_table.table[index[0], index[1]].long()
    width = int(num_candidates.max())
    height = max(1, SLICE_ELEMENTS // batch.limits.vocab_size)

    def logits(part: slice) -> Tensor:
        own = None if adapters is None else adapters.select(layout.prompt_states[part])
        return model.logits(states[index[2, part]], own)

    scores = torch.cat(
        [_score(logits(part), targets[part], width) for part in _slices(len(targets), height)]
    )
    ends = counts.cumsum()
    slot, first, last = batch.to_device(np.stack([slots, ends - counts, ends - 1]))
    shifted = scores.roll(1, dims=0)
    shifted[first] = batch.pending_scores.exchange(slot, scores[last])
    return PromptLogprobs(slots, counts, num_candidates, shifted)


def _slices(count: int, height: int) -> Iterator[slice]:
    return (slice(start, start + height) for start in range(0, count, height))


def _score(logits: Tensor, targets: Tensor, width: int) -> Tensor:
    """[n, 1 + width, 2] int32 of `logits` [n, V]: target and likeliest tokens of each row, as in PendingScores."""
    logprobs = aligned(logits).log_softmax(-1)
    columns = logprobs.gather(1, targets[:, None]), targets[:, None]
    if width:
        best = logprobs.topk(width, dim=-1)
        columns = torch.cat([columns[0], best.values], 1), torch.cat([columns[1], best.indices], 1)
    values, ids = columns
    return torch.stack([ids.to(torch.int32), values.view(torch.int32)], dim=-1)
