"""Identical replicas under one workload: each request goes to one cell of them, and cells share nothing."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from bench.scale.cell import Cell, Failure
from bench.scale.fleet_metrics import FleetMetrics, total
from bench.scale.gateway import Ring, beginning
from bench.scale.simulated_replica import CellParts, Routing
from millrace.simulate.deployment import Deployment
from millrace.simulate.simulated_request import Arrival
from millrace.simulate.workload import ClosedLoop, OpenLoop, Source, Workload

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A workload that is divided among `replicas`, of which about `sample` are simulated, in whole cells."""

    deployment: Deployment
    workload: Workload
    replicas: int = 1
    sample: int = 1
    routing: Routing = "round-robin"
    cell_size: int = 256
    """Most replicas of a cell."""
    gateways: int = 1
    """Of each cell; they share nothing."""
    balance_factor: float = 1.25
    """`prefix` and `kv` give a replica no more than so many times the mean load."""
    failures: tuple[Failure, ...] = ()

    @property
    def division(self) -> Division:
        """Its cells. If each replica alone decides what becomes of its requests, a sample has cells of one replica."""
        is_alone = self.routing == "round-robin" and self.gateways == 1 and not self.failures
        is_sample = self.sample < self.replicas
        return Division(self.replicas, 1 if is_alone and is_sample else self.cell_size)

    @property
    def num_simulated_cells(self) -> int:
        """As many as have `sample` replicas."""
        division = self.division
        return -(-self.sample * division.num_cells // self.replicas)


def simulate(fleets: Sequence[Fleet], *, processes: int = 1) -> list[FleetMetrics]:
    """Simulate each fleet; the cells are divided among `processes`.

    Raises:
        TraceError: a trace is invalid.
        StuckError: the scheduler has a defect.

    """
    jobs = [
        (index, part) for index, fleet in enumerate(fleets) for part in _parts(fleet, processes)
    ]
    chosen, parts = [fleets[index] for index, _ in jobs], [part for _, part in jobs]
    if processes == 1 or len(jobs) == 1:
        done = list(map(_simulate_cells, chosen, parts))
    else:
        with ProcessPoolExecutor(min(processes, len(jobs)), get_context("spawn")) as pool:
            done = list(pool.map(_simulate_cells, chosen, parts))
    results = []
    for index, fleet in enumerate(fleets):
        result = total([each for each, job in zip(done, jobs, strict=True) if job[0] == index])
        result.scale(fleet.replicas / result.replicas)
        results.append(result)
    return results


def _parts(fleet: Fleet, processes: int) -> Iterator[range]:
    count = fleet.num_simulated_cells
    for first in range(min(processes, count)):
        yield range(first, count, processes)


def _simulate_cells(fleet: Fleet, cells: range) -> FleetMetrics:
    """Simulate these cells, one after the other."""
    # The engines make many objects, but no cycles.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return total(
            [_simulate_cell(fleet, cell, source) for cell, source in _sources(fleet, cells)]
        )
    finally:
        if was_enabled:
            gc.enable()


def _simulate_cell(fleet: Fleet, cell: int, source: Source) -> FleetMetrics:
    division = fleet.division
    failures = [
        Failure(failure.at, share(failure.count, cell, division.num_cells), failure.seconds)
        for failure in fleet.failures
    ]
    parts = CellParts(
        fleet.deployment,
        num_replicas=division.size(cell),
        num_gateways=fleet.gateways,
        routing=fleet.routing,
        balance_factor=fleet.balance_factor,
    )
    return Cell(parts, source, failures).run()


def _sources(fleet: Fleet, cells: range) -> Iterator[tuple[int, Source]]:
    """The requests of each of these cells."""
    workload, division = fleet.workload, fleet.division
    if workload.clients is not None:
        for cell in cells:
            yield cell, _closed_loop(workload, division, cell)
    elif division.num_cells == 1:
        yield 0, OpenLoop(workload.arrivals())
    else:
        arrivals = _divided(fleet, cells)
        for cell in cells:
            yield cell, OpenLoop(iter(arrivals.pop(cell)))


def _divided(fleet: Fleet, cells: range) -> dict[int, list[Arrival]]:
    division = fleet.division
    by_prefix = fleet.routing in ("prefix", "kv")
    cells_of = CellsByPrefix(division, fleet.balance_factor) if by_prefix else CellsInTurn(division)
    arrivals: dict[int, list[Arrival]] = {cell: [] for cell in cells}
    for number, arrival in enumerate(fleet.workload.arrivals()):
        mine = arrivals.get(cells_of.choose(number, arrival))
        if mine is not None:
            mine.append(arrival)
    return arrivals


def _closed_loop(workload: Workload, division: Division, cell: int) -> ClosedLoop:
    """A cell has its replicas' shares of requests and clients."""
    replicas = range(cell, division.replicas, division.num_cells)

    def part(number: int) -> int:
        return sum(share(number, replica, division.replicas) for replica in replicas)

    return ClosedLoop(
        workload.requester(f"replica {cell}"),
        requests=part(workload.requests),
        clients=part(workload.clients or 0),
        think_seconds=workload.think_seconds,
    )
