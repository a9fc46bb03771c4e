"""How often draft tokens of one sequence were accepted."""

from __future__ import annotations


class Acceptance:
    """What became of the guesses for one sequence: weighted means, in which older steps fade exponentially."""

    __slots__ = ("rates", "silent", "supply")

    def __init__(self) -> None:
        self.rates: list[float] = []
        """By position: share of guesses that were right, of those made after right ones; empty before the first."""
        self.supply = 1.0
        """Guesses made, of those allowed: prompt lookup finds none where the text has no precedent."""
        self.silent = 0
        """Steps since guesses were last allowed."""
