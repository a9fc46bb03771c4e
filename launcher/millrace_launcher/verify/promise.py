"""Promises about two rounds of answers, and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from millrace_launcher.verify.comparison import Comparison

REFERENCE_TOLERANCE = 1e-3
"""Nats between float32 log probabilities of different implementations."""
TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Nats between log probabilities that differ in the order of sums alone, by the model's dtype."""


class Verdict(Enum):
    """The result of a case."""

    EQUAL = "equal"
    CLOSE = "within tolerance"
    BROKEN = "BROKEN"
    NOT_EXERCISED = "NOT EXERCISED"
    NOT_CHECKED = "not checked"

    @property
    def is_green(self) -> bool:
        """Whether no promise was broken and no requested case is missing."""
        return self not in (Verdict.BROKEN, Verdict.NOT_EXERCISED)


@dataclass(frozen=True, slots=True)
class Promise:
    """Equal bits, or equal tokens with log probabilities within a tolerance, or the tolerance alone."""

    words: str
    tolerance: float = 0.0
    """In nats."""
    tokens: bool = True
    """Whether tokens must be equal."""

    def judge(self, found: Comparison) -> Verdict:
        """Judge a comparison; requests without a complete answer break every promise."""
        if found.failures:
            return Verdict.BROKEN
        if found.num_different == 0:
            return Verdict.EQUAL
        if self.tolerance == 0 or (self.tokens and found.num_other_tokens):
            return Verdict.BROKEN
        return Verdict.CLOSE if found.largest_gap <= self.tolerance else Verdict.BROKEN


BITS = Promise("same bits")


def close(dtype: str) -> Promise:
    """The promise without equality: the same distribution up to rounding."""
    tolerance = TOLERANCES.get(dtype, max(TOLERANCES.values()))
    return Promise(f"within {tolerance:g}", tolerance, tokens=False)


def same_tokens(tolerance: float) -> Promise:
    """The promise of equal tokens, and of log probabilities within the tolerance."""
    return Promise(f"same tokens, within {tolerance:g}", tolerance)
