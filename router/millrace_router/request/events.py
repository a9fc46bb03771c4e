"""What a generation yields: log probabilities of its prompt, then tokens, and the end with the last of them.

`Token` and `TokenEvent` are not frozen, because that would double the time to make one; no code changes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millrace_router.request.request import FinishReason


@dataclass(slots=True)
class Token:
    """One token with its log probability and the text it adds."""

    id: int
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Log probabilities of consecutive tokens of a prompt, whose first one has NaN.

    Beside each token stand as many candidates, the likeliest in its place, most likely first; in one column for all.
    """

    logprobs: Sequence[float]
    candidate_ids: Sequence[int] = ()
    candidate_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """`PromptChunk` of a whole prompt; sent once, before the first token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    candidate_ids: Sequence[int] = ()
    candidate_logprobs: Sequence[float] = ()

    def candidates(self, index: int) -> Iterator[tuple[int, float]]:
        """Ids and log probabilities of the candidates beside one token."""
        count = len(self.candidate_ids) // len(self.ids)
        part = slice(index * count, (index + 1) * count)
        return zip(self.candidate_ids[part], self.candidate_logprobs[part], strict=True)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a generation that did not fail has ended."""

    finish_reason: FinishReason
    generated_text: str
    """Special tokens left out, a matched stop sequence kept."""
    generated_tokens: int
    seed: int | None
    """Set when the generation sampled."""


@dataclass(slots=True)
class TokenEvent:
    """One generated token; `index` counts from 1 without gap."""

    index: int
    token: Token
    top_tokens: tuple[Token, ...] = ()
    finished: Finished | None = None
    """Set with the last token, and there always."""
