"""The costs of what few steps have: decodes that fill more than one KV position, and adapters."""

from __future__ import annotations

from collections.abc import Mapping

from millrace_router.prediction.least_squares import solve_nonnegative
from millrace_router.prediction.step_load import StepLoad

_TRUST = 4.0
"""Weight of the assumed costs, in steps of `_TYPICAL` extra positions."""
_TYPICAL = 4.0
"""Extra positions of such a step."""
_MEMORY = 128
"""Steps with extra positions after which an observation has faded by 1/e."""
_IDLE_MEMORY = 2048
"""Steps without extra positions after which the observations have faded by 1/e, so that one bad step does not last."""
ADAPTER_COEFFICIENTS = ("adapter_byte", "adapter_slice")
"""Seconds for: each byte of the adapters in a step; each slice of 16 ranks that a position is multiplied with."""
_UNITS = (1e6, 1e3)
_ADAPTER_RIDGE = 1e-3
"""Share by which the costs are drawn to 0, where bytes and slices always come together."""
_ADAPTER_MEMORY = 256
"""Steps with adapters after which an observation has faded by 1/e."""


class ExtraCosts:
    """Seconds for extra positions: `once` for a step with any, and `each` per position; neither is negative.

    A ridge regression of the time beyond the expected duration without extra positions, in relative errors as in
    `CostModel`. Without observations `once` is 0, and `each` is the cost of a row. So steps with extra positions do
    not change the costs of other steps, a delayed step counts little, and a few steps correct a wrong assumption.
    """

    def __init__(self) -> None:
        self.once = 0.0
        self.each = 0.0
        self._step = 0.0
        """The assumed duration of a step, which is the scale of errors."""
        self._row = 0.0
        """The assumed cost of a row."""
        self._gram = [0.0, 0.0, 0.0]
        self._moment = [0.0, 0.0]
        self._has_any = False

    @classmethod
    def fixed(cls, *, once: float, each: float) -> ExtraCosts:
        """Costs that do not change."""
        costs = cls()
        costs.once, costs.each = float(once), float(each)
        return costs

    def seconds(self, num_positions: int) -> float:
        """The cost of so many extra positions in one step."""
        return self.once + self.each * num_positions if num_positions else 0.0

    def assume(self, *, step: float, row: float) -> None:
        """Set the assumed costs of a step and of a row."""
        self._step, self._row = step, row
        self._fit()

    def add(self, num_positions: int, seconds: float, *, plain: float, pace: float) -> None:
        """Learn from a step with so many extra positions; without them `plain` seconds were expected."""
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
        """Count a step without extra positions."""
        if self._has_any:
            self._scale(1.0 - 1.0 / _IDLE_MEMORY)
            self._fit()

    def rescale(self, change: float) -> None:
        """Multiply the observed durations by `change`."""
        self._gram = [value / (change * change) for value in self._gram]
        self._moment = [value / change for value in self._moment]

    def _scale(self, factor: float) -> None:
        self._gram = [factor * value for value in self._gram]
        self._moment = [factor * value for value in self._moment]

    def _fit(self) -> None:
        """Solve the normal equations of two unknowns; a negative solution becomes 0."""
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


class AdapterCosts:
    """Seconds for the two counts of `StepLoad`, none of them negative; 0 without observations.

    The time beyond the expected duration of a step without adapters is fitted by weighted least squares.
    """

    def __init__(self, coefficients: Mapping[str, float] | None = None) -> None:
        """`coefficients` are by the names of `ADAPTER_COEFFICIENTS`; absent ones are 0."""
        given = coefficients or {}
        self._costs = [
            given.get(name, 0.0) * unit
            for name, unit in zip(ADAPTER_COEFFICIENTS, _UNITS, strict=True)
        ]
        self._gram = [[0.0, 0.0], [0.0, 0.0]]
        self._moment = [0.0, 0.0]

    def seconds(self, load: StepLoad) -> float:
        """The cost of the adapters of a step."""
        if not load.adapter_slices:
            return 0.0
        return sum(map(float.__mul__, self._costs, _features(load)))

    def add(self, load: StepLoad, seconds: float, *, weight: float) -> None:
        """Learn from a step that took `seconds` more than expected without adapters."""
        features = _features(load)
        for i in range(2):
            self._moment[i] = (1 - 1 / _ADAPTER_MEMORY) * self._moment[i] + weight * features[
                i
            ] * seconds
            for j in range(2):
                product = weight * features[i] * features[j]
                self._gram[i][j] = (1 - 1 / _ADAPTER_MEMORY) * self._gram[i][j] + product
        if all(self._gram[i][i] for i in range(2)):
            ridged = [
                [value * (1 + _ADAPTER_RIDGE * (i == j)) for j, value in enumerate(row)]
                for i, row in enumerate(self._gram)
            ]
            self._costs = solve_nonnegative(ridged, self._moment)

    def rescale(self, factor: float) -> None:
        """Multiply the observed and the fitted seconds by `factor`; relative weights stay."""
        self._costs = [cost * factor for cost in self._costs]
        self._gram = [[value / factor**2 for value in row] for row in self._gram]
        self._moment = [value / factor for value in self._moment]

    def to_json(self) -> dict[str, float]:
        """The coefficients; empty without observations."""
        if not any(self._costs):
            return {}
        pairs = zip(ADAPTER_COEFFICIENTS, self._costs, _UNITS, strict=True)
        return {name: cost / unit for name, cost, unit in pairs}


def _features(load: StepLoad) -> tuple[float, float]:
    return load.adapter_bytes / _UNITS[0], load.adapter_slices / _UNITS[1]
