"""The sign of life of a process: a number that changes with every layer that is computed, and that any thread reads."""

from __future__ import annotations

from collections.abc import Callable


class Pulse:
    """Counts parts of layers; readers compare two values.

    Without a lock, threads may lose each other's counts; one change is as good a sign as two.
    """

    def __init__(self) -> None:
        self._num_halves = 0
        self._count_units: Callable[[], int] = int

    @property
    def value(self) -> int:
        """A number, not negative, that differs from an earlier one if anything was computed in between."""
        return self._num_halves + self._count_units()

    def advance(self) -> None:
        """Record that a part of a layer has been computed, or submitted to the device."""
        self._num_halves += 1

    def follow(self, count_units: Callable[[], int]) -> None:
        """Add what compiled operators count by themselves: they compute all layers in one call."""
        self._count_units = count_units


PULSE = Pulse()
"""That of this process, whose only engine computes on one thread."""
