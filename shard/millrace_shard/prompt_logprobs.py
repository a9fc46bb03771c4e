"""Log probabilities of prompt tokens, from raw logits, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from millrace_shard.batch import Batch
from millrace_shard.prepared import PreparedStep
from millrace_shard.step import Ints

ROWS_AT_ONCE = 256
"""Bounds the temporary distributions."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt tokens that were computed in a step: `counts[i]` values for `slots[i]`."""

    slots: Ints
    counts: Ints
    values: Tensor
    """[sum of counts] float32 on the device; NaN for a prompt's first computed token."""


def prompt_logprobs(logits: Tensor, prepared: PreparedStep, batch: Batch) -> PromptLogprobs | None:
    """What the step's prompts that ask for it get; None when there are none.

    A token is scored by the logits before it, so the last score of a chunk is kept in `batch` and reported with the
    next chunk.
    """
    rows = prepared.prompt_rows
    if not len(rows):
        return None
    slots, counts = prepared.slots[rows], prepared.counts[rows]
    token_slots = np.repeat(slots, counts)
    index = batch.to_device(
        np.stack([token_slots, prepared.prompt_targets, prepared.prompt_logits])
    )
    targets = batch.history[index[0], index[1]].long()
    scores = torch.cat(
        [
            _score(logits[index[2, start:stop]], targets[start:stop])
            for start, stop in pairwise([*range(0, len(targets), ROWS_AT_ONCE), len(targets)])
        ]
    )
    ends = counts.cumsum()
    bounds = batch.to_device(np.stack([slots, ends - counts, ends - 1]))
    values = scores.roll(1)
    values[bounds[1]] = batch.next_prompt_logprob[bounds[0]]
    batch.next_prompt_logprob[bounds[0]] = scores[bounds[2]]
    return PromptLogprobs(slots, counts, values)


def _score(logits: Tensor, targets: Tensor) -> Tensor:
    """Log probability of one target a row."""
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
