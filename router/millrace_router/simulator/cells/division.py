"""The division of a fleet into cells, and the choice of a request's cell. Nothing here depends on replicas' states."""

from __future__ import annotations

import math
from collections import deque

from millrace_router.simulator.cells.ring import Ring
from millrace_router.simulator.cells.ticket import beginning
from millrace_router.simulator.simulated_request import Arrival

WINDOW_SECONDS = 60.0
"""A cell's load is what it got within this time."""


class Division:
    """Replica r is in cell r modulo the number of cells, so the cells are as large as each other, or larger by one."""

    def __init__(self, replicas: int, cell_size: int) -> None:
        self.replicas = replicas
        self.num_cells = math.ceil(replicas / cell_size)

    def size(self, cell: int) -> int:
        """The number of replicas of a cell."""
        return share(self.replicas, cell, self.num_cells)


def share(number: int, index: int, of: int) -> int:
    """The share of part `index`, if `number` is divided into so many parts."""
    return number // of + (index < number % of)


class CellsInTurn:
    """Sends requests to the cells in turn, as often as they have replicas."""

    def __init__(self, division: Division) -> None:
        self._replicas, self._num_cells = division.replicas, division.num_cells

    def choose(self, number: int, arrival: Arrival) -> int:  # noqa: ARG002
        """The cell of a request, `number` in the fleet."""
        return number % self._replicas % self._num_cells


class CellsByPrefix:
    """Hashes the beginning of the prompt; a cell that got too much in the last minute is passed over."""

    def __init__(self, division: Division, balance_factor: float) -> None:
        self._ring = Ring(division.num_cells, b"cell ")
        shares = [division.size(cell) / division.replicas for cell in range(division.num_cells)]
        self._most = [balance_factor * part for part in shares]
        """The part of all requests that a cell may get."""
        self._recent: deque[tuple[float, int]] = deque()
        """Time and cell of the requests of the last minute."""
        self._loads = [0] * division.num_cells

    def choose(self, number: int, arrival: Arrival) -> int:
        """The cell of a request, `number` in the fleet."""
        recent, loads = self._recent, self._loads
        while recent and recent[0][0] < arrival.arrived_at - WINDOW_SECONDS:
            loads[recent.popleft()[1]] -= 1
        total = len(recent) + 1
        walk = self._ring.walk(beginning(arrival, number))
        chosen = next(cell for cell in walk if loads[cell] < self._most[cell] * total)
        loads[chosen] += 1
        recent.append((arrival.arrived_at, chosen))
        return chosen
