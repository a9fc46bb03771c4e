"""The rules of a sequence, as its request states them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry:
    """The DRY penalty: a token that would extend a passage that the sequence has repeated so far becomes less likely.

    It is lowered by `multiplier` * `base` ** (length of the passage - `allowed_length`).
    """

    multiplier: float
    base: float
    allowed_length: int
    """Shorter passages are free."""
    window: int
    """How many of the last tokens are looked at; 0 for all."""
    breakers: tuple[int, ...] = ()
    """Tokens that no passage contains."""

    @property
    def is_valid(self) -> bool:
        """Whether the numbers have a meaning."""
        numbers = (self.multiplier, self.base)
        return all(math.isfinite(one) and one >= 0 for one in numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRules:
    """All rules of one sequence; the defaults are no rules."""

    allowed_ids: tuple[int, ...] = ()
    """The only tokens that it may have; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Passages that its generated tokens may not have, none of them empty."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that it may not have before its minimum of new tokens, beside the model's end-of-sequence ids."""
    dry: Dry | None = None

    def __bool__(self) -> bool:
        return bool(self.allowed_ids or self.bad_words or self.stop_ids or self.dry)

    @property
    def is_valid(self) -> bool:
        """Whether all rules have a meaning."""
        return all(self.bad_words) and (self.dry is None or self.dry.is_valid)

    def ids(self) -> Iterator[int]:
        """Return all token ids that the rules name."""
        breakers = () if self.dry is None else self.dry.breakers
        return chain(self.allowed_ids, *self.bad_words, self.stop_ids, breakers)


NO_RULES = SequenceRules()
