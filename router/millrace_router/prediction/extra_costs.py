"""What it adds to a step that decodes fill more than one KV position: learned from few steps, and not for ever."""

from __future__ import annotations

_TRUST = 4.0
"""Steps, of as many extra positions as below, that what is assumed beforehand counts for."""
_TYPICAL = 4.0
_MEMORY = 128
"""Steps with extra positions that count; an older one fades by 1/e."""
_PATIENCE = 2048
"""Steps without any in which what is known fades by 1/e, so that one bad impression does not last."""


class ExtraCosts:
    """Seconds for extra positions: `once` for having any, `each` for every one; neither is negative.

    Ridge regression of what steps took beyond the time expected of them without, in relative errors as in `CostModel`,
    towards no cost at all for having any and that of a row for each. So those steps change nothing of what is known
    of others, one that a neighbour held up says little, and a few suffice where the assumption is far off.
    """

    def __init__(self) -> None:
        self.once = 0.0
        self.each = 0.0
        self._step = 0.0
        """What is assumed: about a step's seconds, as the scale of errors; and a row's."""
        self._row = 0.0
        self._gram = [0.0, 0.0, 0.0]
        self._moment = [0.0, 0.0]
        self._has_any = False

    @classmethod
    def fixed(cls, *, once: float, each: float) -> ExtraCosts:
        """Costs that are known."""
        costs = cls()
        costs.once, costs.each = float(once), float(each)
        return costs

    def seconds(self, num_positions: int) -> float:
        """What so many extra positions in one step cost."""
        return self.once + self.each * num_positions if num_positions else 0.0

    def assume(self, *, step: float, row: float) -> None:
        """Take the costs of a step and a row as what is known beforehand."""
        self._step, self._row = step, row
        self._fit()

    def add(self, num_positions: int, seconds: float, *, plain: float, pace: float) -> None:
        """Learn from a step of so many extra positions, of which `plain` seconds were expected without them."""
        expected = plain + pace * self.seconds(num_positions)
        weight = pace * pace / (expected * max(expected, seconds))
        beyond = (seconds - plain) / pace
        self._scale(1.0 - 1.0 / _MEMORY)
        for place, value in enumerate((1.0, num_positions, num_positions * num_positions)):
            self._gram[place] += weight * value
        self._moment[0] += weight * beyond
        self._moment[1] += weight * beyond * num_positions
        self._has_any = True
        self._fit()

    def fade(self) -> None:
        """Let a step without extra positions pass."""
        if self._has_any:
            self._scale(1.0 - 1.0 / _PATIENCE)
            self._fit()

    def rescale(self, change: float) -> None:
        """Let everything have taken `change` times as long."""
        self._gram = [value / (change * change) for value in self._gram]
        self._moment = [value / change for value in self._moment]

    def _scale(self, factor: float) -> None:
        self._gram = [factor * value for value in self._gram]
        self._moment = [factor * value for value in self._moment]

    def _fit(self) -> None:
        """Solve the normal equations of two unknowns; one that would be negative is 0."""
        if self._step <= 0.0:
            return
        unit = _TRUST / (self._step * self._step)
        known = unit * _TYPICAL * _TYPICAL
        one, mixed, square = self._gram[0] + unit, self._gram[1], self._gram[2] + known
        first, second = self._moment[0], self._moment[1] + known * self._row
        scale = one * square - mixed * mixed
        self.once = (first * square - second * mixed) / scale
        self.each = (second * one - first * mixed) / scale
        if self.once < 0.0:
            self.once, self.each = 0.0, max(0.0, second / square)
        elif self.each < 0.0:
            self.once, self.each = max(0.0, first / one), 0.0
