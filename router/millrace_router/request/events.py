"""The events of a generation: log probabilities of its prompt, then tokens, and the end with the last token.

`Token` and `TokenEvent` are not frozen, because that would double the time to make one; no code changes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millrace_router.request.request import FinishReason


@dataclass(slots=True)
class Token:
    """One token with its log probability and the text that it adds."""

    id: int
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Log probabilities of consecutive tokens of a prompt; the first token of a prompt has NaN.

    Each token has the same number of candidates, the likeliest tokens in its place, most likely first. The candidates
    of all tokens are in one flat column.
    """

    logprobs: Sequence[float]
    candidate_ids: Sequence[int] = ()
    candidate_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """`PromptChunk` of a whole prompt."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    candidate_ids: Sequence[int] = ()
    candidate_logprobs: Sequence[float] = ()

    def candidates(self, index: int) -> Iterator[tuple[int, float]]:
        """Return ids and log probabilities of the candidates of one token."""
        count = len(self.candidate_ids) // len(self.ids)
        part = slice(index * count, (index + 1) * count)
        return zip(self.candidate_ids[part], self.candidate_logprobs[part], strict=True)


@dataclass(frozen=True, slots=True)
class Finished:
    """The normal end of a generation."""

    finish_reason: FinishReason
    generated_text: str
    """Without special tokens, with a matched stop sequence."""
    generated_tokens: int
    seed: int | None
    """The seed, if the generation sampled."""


@dataclass(slots=True)
class TokenEvent:
    """One generated token; `index` counts from 1 without gap; 0: the end of a request that generates none."""

    index: int
    token: Token
    top_tokens: tuple[Token, ...] = ()
    finished: Finished | None = None
    """Set with the last token, and only there."""


def end_without_token() -> TokenEvent:
    """Return the end of a request that generates none."""
    finished = Finished(FinishReason.LENGTH, "", 0, None)
    return TokenEvent(0, Token(0, "", 0.0, special=True), (), finished)
