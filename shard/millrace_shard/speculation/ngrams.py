"""Guessing by looking up: what followed the last few tokens when they occurred before.

Prompt lookup decoding (Saxena 2023): the longest suffix of up to three tokens that has occurred earlier in prompt or
answer, its latest occurrence, and the tokens after it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from millrace_shard.arrays import Ints
from millrace_shard.batch.draft_tokens import DraftTokens
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import StepRows
from millrace_shard.speculation.proposer import Proposer

LONGEST_SUFFIX = 3


class NgramProposer(Proposer):
    """Looks in the histories of the sequences themselves, where these are on the host."""

    def __init__(self, tokens: NDArray[np.int32], device: torch.device) -> None:
        """`tokens` [slots or more, length] hold those of each sequence by the time that it is asked."""
        self._tokens = tokens
        self._device = device

    def has_guesses(self, slots: Ints, lengths: Ints) -> bool:
        """Whether the last token of any occurred before."""
        rows = zip(slots.tolist(), (lengths - 1).tolist(), strict=True)
        return any(
            (self._tokens[slot, :last] == self._tokens[slot, last]).any() for slot, last in rows
        )

    def propose(self, rows: StepRows) -> DraftTokens:
        """A chain for each row that has room for one and an n-gram that occurred before."""
        chains = [
            lookup(self._tokens[slot, :length], int(most)) if most else np.empty(0, dtype=np.int64)
            for slot, length, most in zip(
                rows.slots, rows.num_tokens, rows.most_guesses, strict=True
            )
        ]
        return DraftTokens.of(chains, self._device)


class CopyingNgramProposer(NgramProposer):
    """Keeps a copy of every sequence's tokens on the host."""

    reads_tokens = True

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device) -> None:
        super().__init__(np.zeros((num_slots, max_tokens), dtype=np.int32), device)

    def admit(self, sequence: Sequence) -> None:
        """Take its prompt."""
        self._tokens[sequence.slot, : sequence.num_inputs] = sequence.input_ids

    def read(self, slots: Ints, positions: Ints, ids: Ints) -> None:
        """Take what was sampled."""
        self._tokens[slots, positions] = ids


def lookup(tokens: NDArray[np.int32], most: int) -> Ints:
    """Up to `most` tokens that may follow `tokens` [n]; none where their last one never occurred before.

    What would follow past the end is taken from the beginning of the repetition, as if it went on.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not len(ends):
        return np.empty(0, dtype=np.int64)
    for back in range(1, LONGEST_SUFFIX):
        if len(tokens) <= back:
            break
        longer = ends[(ends >= back) & (tokens[ends - back] == tokens[-1 - back])]
        if not len(longer):
            break
        ends = longer
    period = len(tokens) - 1 - int(ends[-1])
    places = len(tokens) - period + np.arange(most) % period
    return tokens[places].astype(np.int64)
