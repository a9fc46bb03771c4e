"""What a generation tells its reader, in order: prompt, tokens, the end with the last of them.

`Token` and `TokenEvent` are not frozen, because that would double what it costs to make them; nothing changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace_router.request import FinishReason


@dataclass(slots=True)
class Token:
    """One token with its log probability and the text it adds."""

    id: int
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt's tokens, the first NaN; sent once, before the first token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


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


Event = PromptLogprobs | TokenEvent
