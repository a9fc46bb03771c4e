"""Identical replicas under one workload: each request goes to one cell of them, and cells share nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Self

from millrace_router.simulator.cells.cell import Cell
from millrace_router.simulator.cells.division import (
    CellsByPrefix,
    CellsInTurn,
    Division,
    share,
)
from millrace_router.simulator.cells.failures import Failure
from millrace_router.simulator.cells.sources import ClosedLoop, OpenLoop, Source
from millrace_router.simulator.cells.wiring import CellParts, Routing
from millrace_router.simulator.deployment import Deployment
from millrace_router.simulator.metrics import SimulationMetrics, total
from millrace_router.simulator.simulated_request import Arrival
from millrace_router.simulator.workload import Workload


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


def simulate(fleets: Sequence[Fleet], *, processes: int = 1) -> list[SimulationMetrics]:
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


def _simulate_cells(fleet: Fleet, cells: range) -> SimulationMetrics:
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


def _simulate_cell(fleet: Fleet, cell: int, source: Source) -> SimulationMetrics:
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


@dataclass(frozen=True, slots=True)
class Sweep:
    """A flag, without its dashes, and the values it takes."""

    flag: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `flag=value,value`.

        Raises:
            ValueError: it is something else.

        """
        flag, equals, values = text.partition("=")
        given = tuple(value.strip() for value in values.split(","))
        if not flag or not equals or not all(given):
            raise ValueError(f"{text!r} is no sweep: give FLAG=VALUE,VALUE")
        return cls(flag.strip().lstrip("-").replace("_", "-"), given)

    @property
    def field(self) -> str:
        """The name of the field."""
        return self.flag.replace("-", "_")

    @staticmethod
    def points(sweeps: Sequence[Sweep]) -> list[tuple[str, ...]]:
        """Every combination of values, in which the first sweep changes last; one empty combination without sweeps."""
        return list(product(*(sweep.values for sweep in sweeps)))
