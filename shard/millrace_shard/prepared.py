"""A step as the host lays it out, before anything of it is on the device."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_shard.sampling import SamplingRows
from millrace_shard.step import Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedStep:
    """A forward pass laid out on the host, and what its rows mean."""

    slots: Ints
    """[B], chunks first."""
    counts: Ints
    """[B], tokens each row computes."""
    positions: Ints
    """[T], absolute position of each token in its sequence."""
    logit_rows: Ints
    """[L], the tokens whose logits are wanted."""
    num_chunks: int
    """How many of the rows compute a prompt."""
    sampled: Ints
    """[R], slots of the rows that yield a token."""
    sampling: SamplingRows
    sampling_logits: Ints | None
    """[R], their place among the logits; None when those are all of them, in order."""
    unfinished: Ints
    """[U], slots of the rows with prompt left: the logits of their last token show whether all before is finite."""
    unfinished_logits: Ints
    """[U], their place among the logits."""
    prompt_rows: Ints
    """[P], rows in `slots` whose prompt logprobs are wanted."""
    prompt_logits: Ints
    """Place among the logits of every token of those rows, in order."""
    prompt_targets: Ints
    """The position each of these predicts, clamped to the prompt."""
