"""Numbers of tokens drawn from a distribution that is written in a few characters."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Self

KINDS = {"fixed": 1, "uniform": 2, "exponential": 1, "lognormal": 2, "pareto": 2}
"""Kinds of distribution, and how many parameters each takes before the optional maximum."""
SYNTAX = (
    "512, uniform:LEAST:MOST, exponential:MEAN, lognormal:MEDIAN:SIGMA or pareto:LEAST:ALPHA;"
    " a last :MAXIMUM cuts the tail"
)

LONGEST = 1e9
"""Tokens at which even the heaviest tail ends."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, all at least 1."""

    kind: str
    parameters: tuple[float, ...]
    maximum: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `SYNTAX` describes.

        Raises:
            ValueError: it is something else.

        """
        kind, *words = text.split(":")
        if not words:
            kind, words = "fixed", [kind]
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            raise ValueError(f"{text!r} is no length: give {SYNTAX}") from None
        count = KINDS.get(kind)
        if count is None or len(numbers) not in (count, count + 1) or not _valid(kind, numbers):
            raise ValueError(f"{text!r} is no length: give {SYNTAX}")
        maximum = int(numbers[count]) if len(numbers) > count else None
        return cls(kind, tuple(numbers[:count]), maximum)

    def __str__(self) -> str:
        """As `parse` reads it."""
        maximum = () if self.maximum is None else (self.maximum,)
        return ":".join([self.kind, *(f"{number:g}" for number in (*self.parameters, *maximum))])

    def draw(self, random: Random) -> int:
        """One length."""
        try:
            value = self._value(random)
        except OverflowError:
            value = LONGEST
        return max(1, int(min(value, self.maximum or LONGEST)))

    def _value(self, random: Random) -> float:
        first, *rest = self.parameters
        match self.kind:
            case "uniform":
                return random.uniform(first, rest[0] + 1)
            case "exponential":
                return random.expovariate(1 / first)
            case "lognormal":
                return first * random.lognormvariate(0.0, rest[0])
            case "pareto":
                return first * random.paretovariate(rest[0])
            case _:
                return first


def _valid(kind: str, numbers: list[float]) -> bool:
    positive = all(0 < number <= LONGEST for number in numbers)
    return positive and (kind != "uniform" or numbers[0] <= numbers[1])
