"""Which tokens of which sequences a step computes for sure, and how much may be guessed on top."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from millrace_shard.step import Flags, Ints, no_ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WideRows:
    """Decodes that were allowed more than one position, those that have no position left included."""

    slots: Ints = field(default_factory=no_ints)
    """[W]."""
    computed: Ints = field(default_factory=no_ints)
    """[W], KV positions that they will have filled, guesses aside."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """B rows, chunks first; decodes of sequences that have no position left are not among them."""

    slots: Ints
    """[B]."""
    num_chunks: int
    """How many of the rows compute a prompt."""
    starts: Ints
    """[B], first position that each computes."""
    counts: Ints
    """[B], tokens that each computes: of its prompt, or sampled ones whose KV is not computed yet."""
    finished: Flags
    """[B], whether these are all that there are, so that a token is sampled."""
    most_guesses: Ints
    """[B], guesses that each may be given on top; 0 unless it is finished."""
    most_tokens: Ints
    """[B], tokens that each may yield."""
    wide: WideRows

    @property
    def num_tokens(self) -> Ints:
        """[B], length of each sequence up to the last token computed for sure."""
        return self.starts + self.counts


def spread(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Of `counts[b]` consecutive tokens from position `starts[b]` on, for each row b: row and position, [T] each."""
    rows = np.repeat(np.arange(len(counts)), counts)
    firsts = counts.cumsum() - counts
    return rows, np.arange(len(rows)) + (starts - firsts)[rows]
