"""A step as the host lays it out, before anything of it is on the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from millrace_shard.arrays import Flags, Ints, no_ints
from millrace_shard.sampling.sampling_rows import SamplingRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLayout:
    """A forward pass laid out on the host, and what its rows mean."""

    slots: Ints
    """[B], chunks first."""
    starts: Ints
    """[B], first position that each row computes."""
    counts: Ints
    """[B], tokens each row computes, guesses included."""
    guesses: Ints
    """[B], how many of them, at their end, are guesses."""
    logit_rows: Ints
    """[L = R + U], the tokens whose logits are wanted, but for those that only score a prompt: first those after which
    is sampled, then the last ones of rows with more to compute, so that neither has to be gathered."""
    num_chunks: int
    """How many of the rows compute a prompt."""
    yields: Ints
    """[Y], which rows sample: one token after their last for sure, and one after each guess."""
    yield_slots: Ints
    """[Y], their slots."""
    num_samples: Ints
    """[Y], positions that each of them samples."""
    admissions: Ints
    """[Y], which admission to its slot each belongs to."""
    most_tokens: Ints
    """[Y], tokens that each may yield."""
    sampled: Ints
    """[R], slots of the positions that are sampled, those of a row side by side."""
    sampling: SamplingRows
    unfinished: Ints
    """[U], slots of the rows with more to compute: the logits of their last token show whether all before is finite."""
    prompt_rows: Ints
    """[P], rows in `slots` whose prompt logprobs are wanted."""
    state_rows: Ints
    """[S], the tokens whose hidden states are wanted where prompts are scored: of `logit_rows` and of those rows."""
    logit_states: Ints
    """[L], place of `logit_rows` among them."""
    prompt_states: Ints
    """Place among them of every token of those rows, in order."""
    prompt_targets: Ints
    """The position each of these predicts, clamped to the prompt."""
    is_plain: bool
    """Whether every row is a decode of one position that samples, and for which nobody guesses."""

    def repeated(self, starts: Ints, most_tokens: Ints) -> StepLayout:
        """The same rows at other positions, of a step that is plain; all columns but these are shared."""
        return replace(
            self,
            starts=starts,
            most_tokens=most_tokens,
            sampling=replace(self.sampling, positions=starts + 1),
        )


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
