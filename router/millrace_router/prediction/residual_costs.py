"""The costs of what few steps have: decodes that fill more than one KV position, and adapters."""

from __future__ import annotations

from collections.abc import Sequence

from millrace_router.prediction.least_squares import solve_nonnegative

_RIDGE = 1e-3
"""Share by which the costs are drawn to the assumed ones, where both counts always come together."""


class ResidualCosts:
    """Seconds for two counts of a step, neither negative, fitted to the time beyond the expected duration without them.

    A fading ridge regression in relative errors as in `CostModel`, of steps with such counts alone. So they do not
    change the costs of other steps, a delayed step counts little, and a few steps correct a wrong assumption.
    """

    def __init__(self, costs: Sequence[float] = (0.0, 0.0), *, memory: int) -> None:
        """`memory` is the number of steps after which an observation has faded by 1/e."""
        self.costs = list(costs)
        self._memory = memory
        self._assumed = self.costs
        self._trust = (0.0, 0.0)
        """Weights of the assumed costs."""
        self._gram = [[0.0, 0.0], [0.0, 0.0]]
        self._moment = [0.0, 0.0]

    def seconds(self, counts: Sequence[float]) -> float:
        """The cost of a step with these counts."""
        return self.costs[0] * counts[0] + self.costs[1] * counts[1]

    def assume(self, costs: Sequence[float], trust: tuple[float, float]) -> None:
        """Set the costs that are assumed without observations, and their weights."""
        self._assumed, self._trust = list(costs), trust
        self._fit()

    def add(self, counts: Sequence[float], seconds: float, *, plain: float, pace: float) -> None:
        """Learn from a step with these counts; without them `plain` seconds were expected."""
        expected = plain + pace * self.seconds(counts)
        weight = pace * pace / (expected * max(expected, seconds))
        self._fade(1.0 - 1.0 / self._memory)
        for i in range(2):
            self._moment[i] += weight * counts[i] * (seconds - plain) / pace
            for j in range(2):
                self._gram[i][j] += weight * counts[i] * counts[j]
        self._fit()

    def idle(self, memory: int) -> None:
        """Count a step without such counts, by `memory` of which the observations fade, so that no bad one lasts."""
        if self._gram[0][0]:
            self._fade(1.0 - 1.0 / memory)
            self._fit()

    def rescale(self, change: float) -> None:
        """Multiply the observed durations by `change`."""
        self.costs = [cost * change for cost in self.costs]
        self._gram = [[value / change**2 for value in row] for row in self._gram]
        self._moment = [value / change for value in self._moment]

    def _fade(self, factor: float) -> None:
        self._gram = [[factor * value for value in row] for row in self._gram]
        self._moment = [factor * value for value in self._moment]

    def _fit(self) -> None:
        matrix, right = [list(row) for row in self._gram], list(self._moment)
        for i in range(2):
            pull = self._trust[i] + _RIDGE * self._gram[i][i]
            matrix[i][i] += pull
            right[i] += pull * self._assumed[i]
        if matrix[0][0] and matrix[1][1]:
            self.costs = solve_nonnegative(matrix, right)
