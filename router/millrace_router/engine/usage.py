"""Token counts of answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice, or of several added up."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    reasoning_tokens: int | None = None
    """Tokens of the answer that belong to thoughts; None if thoughts are not told from text."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            _sum(self.reasoning_tokens, other.reasoning_tokens),
        )


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other
