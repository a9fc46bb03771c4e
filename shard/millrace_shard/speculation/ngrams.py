"""Draft tokens by prompt lookup: the tokens after an earlier occurrence of the last few tokens.

Prompt lookup decoding (Saxena 2023) takes the longest suffix of up to three tokens that occurs earlier in prompt or
answer, and copies the tokens after its latest occurrence.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from millrace_shard.arrays import Ints, no_ints
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import DraftTokens, StepRows
from millrace_shard.speculation.proposer import Proposer

LONGEST_SUFFIX = 3


class NgramProposer(Proposer):
    """Searches a token table on the host."""

    def __init__(self, tokens: NDArray[np.int32], device: torch.device) -> None:
        """`tokens` [slots or more, length] has all tokens of a sequence when the proposer drafts."""
        self._tokens = tokens
        self._device = device

    def has_drafts(self, slots: Ints, lengths: Ints) -> bool:
        """Whether the last token of a sequence occurs earlier in it."""
        rows = zip(slots.tolist(), (lengths - 1).tolist(), strict=True)
        return any(
            (self._tokens[slot, :last] == self._tokens[slot, last]).any() for slot, last in rows
        )

    def propose(self, rows: StepRows) -> DraftTokens:
        """Draft tokens for each row that may have some and whose last token occurs earlier."""
        drafts = [
            lookup(self._tokens[slot, :length], int(count)) if count else no_ints()
            for slot, length, count in zip(
                rows.slots, rows.num_tokens, rows.max_draft_tokens, strict=True
            )
        ]
        return DraftTokens.of(drafts, self._device)


class CopyingNgramProposer(NgramProposer):
    """Keeps a copy of all tokens on the host."""

    reads_tokens = True

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device) -> None:
        super().__init__(np.zeros((num_slots, max_tokens), dtype=np.int32), device)

    def admit(self, sequence: Sequence) -> None:
        self._tokens[sequence.slot, : sequence.num_inputs] = sequence.input_ids

    def read(self, slots: Ints, positions: Ints, ids: Ints) -> None:
        self._tokens[slots, positions] = ids


def lookup(tokens: NDArray[np.int32], count: int) -> Ints:
    """`count` tokens that may follow `tokens` [n], or none if their last token does not occur earlier.

    If the earlier occurrence has fewer tokens after it, they repeat.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not len(ends):
        return no_ints()
    for back in range(1, LONGEST_SUFFIX):
        if len(tokens) <= back:
            break
        longer = ends[(ends >= back) & (tokens[ends - back] == tokens[-1 - back])]
        if not len(longer):
            break
        ends = longer
    period = len(tokens) - 1 - int(ends[-1])
    places = len(tokens) - period + np.arange(count) % period
    return tokens[places].astype(np.int64)
