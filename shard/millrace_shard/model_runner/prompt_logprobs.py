"""Log probabilities of prompt tokens and of the likeliest in their place, from raw logits, chunk by chunk.

The logits of a prompt never exist as a whole: its hidden states do, as of any prompt that is computed, and become
logits a slice of positions at a time, of which the scores alone are kept. So the memory that this takes does not
depend on the length of prompts: `SLICE_ELEMENTS` logits, as many log probabilities, and what head and `topk` need.
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
from millrace_shard.models.interface import CausalModel

SLICE_ELEMENTS = 1 << 24
"""Logits of prompt positions that exist at a time, 64 MiB of float32, or those of one position where that has more."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt tokens that were computed in a step: `counts[i]` of them, with candidates, for `slots[i]`."""

    slots: Ints
    counts: Ints
    num_candidates: Ints
    """Candidates that each slot wants for each of its tokens."""
    scores: Tensor
    """[sum of counts, 1 + W, 2] int32 on the device, as in PendingScores; W is the largest of those."""

    def add_to(self, result: StepResult, scores: Tensor) -> StepResult:
        """`result` with these columns; `scores` is the field of this name on the host, once its work is done."""
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
        wanted = np.repeat(self.num_candidates, self.counts)
        is_wanted = np.arange(ids.shape[1] - 1) < wanted[:, None]
        return replace(
            result,
            prefill_top_counts=self.num_candidates,
            prefill_top_ids=ids[:, 1:][is_wanted].astype(np.int64),
            prefill_top_logprobs=logprobs[:, 1:][is_wanted],
        )


def prompt_logprobs(
    states: Tensor, model: CausalModel, prepared: StepLayout, batch: Batch
) -> PromptLogprobs:
    """What the step's prompts that ask for it get, of which there is one at least.

    `states` [S, hidden] are those of `prepared.state_rows`. Every rank calls it with the same step.
    """
    rows = prepared.prompt_rows
    slots, counts = prepared.slots[rows], prepared.counts[rows]
    num_candidates = batch.pending_scores.num_candidates[slots]
    token_slots = np.repeat(slots, counts)
    index = batch.to_device(
        np.stack([token_slots, prepared.prompt_targets, prepared.prompt_states])
    )
    targets = batch.history.table[index[0], index[1]].long()
    width = int(num_candidates.max())
    height = max(1, SLICE_ELEMENTS // batch.limits.vocab_size)
    scores = torch.cat(
        [
            _score(model.logits(states[index[2, part]]), targets[part], width)
            for part in _slices(len(targets), height)
        ]
    )
    ends = counts.cumsum()
    slot, first, last = batch.to_device(np.stack([slots, ends - counts, ends - 1]))
    shifted = scores.roll(1, dims=0)
    shifted[first] = batch.pending_scores.exchange(slot, scores[last])
    return PromptLogprobs(slots, counts, num_candidates, shifted)


def _slices(count: int, height: int) -> Iterator[slice]:
    return (slice(start, start + height) for start in range(0, count, height))


def _score(logits: Tensor, targets: Tensor, width: int) -> Tensor:
    """[n, 1 + width, 2] int32 of `logits` [n, V]: one target a row and its likeliest tokens, as in PendingScores."""
    logprobs = logits.log_softmax(-1)
    columns = logprobs.gather(1, targets[:, None]), targets[:, None]
    if width:
        best = logprobs.topk(width, dim=-1)
        columns = torch.cat([columns[0], best.values], 1), torch.cat([columns[1], best.indices], 1)
    values, ids = columns
    return torch.stack([ids.to(torch.int32), values.view(torch.int32)], dim=-1)
