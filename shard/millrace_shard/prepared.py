"""A step as the host lays it out, before anything of it is on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace_shard.sampling_rows import SamplingRows
from millrace_shard.step import Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedStep:
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

    def repeated(self, starts: Ints, most_tokens: Ints) -> PreparedStep:
        """The same rows at other positions, of a step that is plain; all columns but these are shared."""
        return replace(
            self,
            starts=starts,
            most_tokens=most_tokens,
            sampling=replace(self.sampling, positions=starts + 1),
        )
