"""Non-negative least squares of a few unknowns, from its normal equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TOLERANCE = 1e-9
"""A gradient below this share of its moment is a rounding error."""

Matrix = Sequence[Sequence[float]]

_MEMORY = 512
"""Steps of a kind after which an observation has faded by 1/e: several batch sizes, but only seconds."""


def solve_nonnegative(gram: Matrix, moment: Sequence[float]) -> list[float]:
    """Return the x >= 0 that minimises x'Gx / 2 - m'x; `gram` must be positive definite.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23). It begins with every
    unknown free, so it solves once if no unknown is at its bound.
    """
    size = len(moment)
    x = [1.0] * size
    free = list(range(size))
    for _ in range(3 * size):  # ends much earlier, unless rounding errors make it cycle
        _descend(gram, moment, x, free)
        bound = [i for i in range(size) if i not in free]
        slopes = [moment[i] - sum(gram[i][j] * x[j] for j in free) for i in bound]
        steepest = max(range(len(bound)), key=slopes.__getitem__, default=None)
        if steepest is None or slopes[steepest] <= _TOLERANCE * abs(moment[bound[steepest]]):
            break
        free.append(bound[steepest])
    return x


def _descend(gram: Matrix, moment: Sequence[float], x: list[float], free: list[int]) -> None:
    """Move `x` to the minimum over the unknowns in `free`, binding those that would become negative."""
    while free:
        target = _solve(gram, moment, free)
        negative = [k for k, value in enumerate(target) if value <= 0.0]
        if not negative:
            for i, value in zip(free, target, strict=True):
                x[i] = value
            return
        first = min(negative, key=lambda k: x[free[k]] / ((x[free[k]] - target[k]) or 1.0))
        start = x[free[first]]
        reach = start / ((start - target[first]) or 1.0)
        for i, value in zip(free, target, strict=True):
            x[i] = max(0.0, x[i] + reach * (value - x[i]))
        x[free.pop(first)] = 0.0


def _solve(gram: Matrix, moment: Sequence[float], chosen: Sequence[int]) -> list[float]:
    """Return the unconstrained minimum over the `chosen` unknowns, the others 0: Gauss elimination."""
    rows = [[*(gram[i][j] for j in chosen), moment[i]] for i in chosen]
    size = len(rows)
    for k, pivot in enumerate(rows):
        for row in rows[k + 1 :]:
            factor = row[k] / pivot[k]
            for j in range(k + 1, size + 1):
                row[j] -= factor * pivot[j]
    solution = [0.0] * size
    for k in reversed(range(size)):
        row = rows[k]
        solved = sum(row[j] * solution[j] for j in range(k + 1, size))
        solution[k] = (row[size] - solved) / row[k]
    return solution


class NormalEquations:
    """Normal equations of weighted, fading observations over the first `size` features."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._unit = 1.0
        """Weight of the next observation; it grows, which fades the earlier ones at no cost."""

    def learned(self) -> list[Any]:
        """Return all that it has learned, in types of JSON, for `resume`."""
        return [self._unit, self._gram, self._moment]

    def resume(self, learned: list[Any]) -> None:
        """Continue from the result of `learned`. Raises ValueError: that is of another size."""
        self._unit, self._gram, self._moment = learned
        if [self._size] * 2 != [len(self._gram), len(self._moment)]:
            raise ValueError(f"not normal equations of {self._size} unknowns")

    def add(self, features: Sequence[float], seconds: float, weight: float) -> None:
        """Count one observation; features past `size` must be 0."""
        self._unit *= 1.0 + 1.0 / _MEMORY
        weight *= self._unit
        moment = self._moment
        for i, row in enumerate(self._gram):
            weighted = weight * features[i]
            moment[i] += weighted * seconds
            for j in range(i + 1):
                row[j] += weighted * features[j]

    def rescale(self, change: float) -> None:
        """Multiply the observed durations by `change`, and reset the weight of the next observation to 1."""
        unit = self._unit * change
        self._gram = [[value / (unit * change) for value in row] for row in self._gram]
        self._moment = [value / unit for value in self._moment]
        self._unit = 1.0

    def plus(self, smaller: NormalEquations) -> tuple[list[list[float]], list[float]]:
        """Return the sum of both normal equations, with the complete matrix."""
        gram, moment = [list(row) for row in self._gram], list(self._moment)
        for i in range(smaller._size):
            moment[i] += smaller._moment[i]
            for j in range(i + 1):
                gram[i][j] += smaller._gram[i][j]
        for i in range(self._size):
            for j in range(i):
                gram[j][i] = gram[i][j]
        return gram, moment
