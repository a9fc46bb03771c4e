"""Identical replicas under one workload: each request goes to one replica, and replicas share nothing."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import product
from multiprocessing import get_context
from typing import Literal, Self
from zlib import crc32

from millrace_router.simulator.deployment import Deployment
from millrace_router.simulator.engine import Engine
from millrace_router.simulator.metrics import SimulationMetrics, total
from millrace_router.simulator.workload import Workload

WAVE = 256
"""Most replicas that one process simulates at a time; their planners must fit into its memory."""

Routing = Literal["round-robin", "prefix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A workload that is divided among `replicas`, of which the first `sample` are simulated."""

    deployment: Deployment
    workload: Workload
    replicas: int = 1
    sample: int = 1
    routing: Routing = "round-robin"
    """`prefix` sends the requests of one group to one replica."""


def simulate(fleets: Sequence[Fleet], *, cores: int = 1) -> list[SimulationMetrics]:
    """Simulate each fleet, on `cores` processes.

    Raises:
        TraceError: a trace is invalid.
        StuckError: the scheduler has a defect.

    """
    jobs = [(index, wave) for index, fleet in enumerate(fleets) for wave in _waves(fleet, cores)]
    if cores == 1 or len(jobs) == 1:
        waves = [_simulate_wave(fleets[index], wave) for index, wave in jobs]
    else:
        with ProcessPoolExecutor(min(cores, len(jobs)), get_context("spawn")) as pool:
            chosen = [fleets[index] for index, _ in jobs]
            waves = list(pool.map(_simulate_wave, chosen, [wave for _, wave in jobs]))
    results = []
    for index, fleet in enumerate(fleets):
        result = total([each for each, job in zip(waves, jobs, strict=True) if job[0] == index])
        result.scale(fleet.replicas / fleet.sample)
        results.append(result)
    return results


def _waves(fleet: Fleet, cores: int) -> Iterator[range]:
    size = min(WAVE, math.ceil(fleet.sample / cores))
    for start in range(0, fleet.sample, size):
        yield range(start, min(start + size, fleet.sample))


def _simulate_wave(fleet: Fleet, numbers: range) -> SimulationMetrics:
    """Simulate the replicas of these numbers."""
    # The engines make many objects, but no cycles.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        if fleet.workload.clients is not None:
            return total([_closed_loop(fleet, number) for number in numbers])
        return _open_loop(fleet, numbers)
    finally:
        if was_enabled:
            gc.enable()


def _open_loop(fleet: Fleet, numbers: range) -> SimulationMetrics:
    engines = {number: Engine(fleet.deployment) for number in numbers}
    by_prefix = fleet.routing == "prefix"
    for index, arrival in enumerate(fleet.workload.arrivals()):
        key = crc32(arrival.group.encode()) if by_prefix and arrival.group else index
        engine = engines.get(key % fleet.replicas)
        if engine is not None:
            engine.run_until(arrival.arrived_at)
            engine.arrive(arrival)
    for engine in engines.values():
        engine.run_until(math.inf)
    return total([engine.metrics for engine in engines.values()])


def _closed_loop(fleet: Fleet, number: int) -> SimulationMetrics:
    """Simulate one replica with its share of the clients; a refused client goes on with its next request."""
    workload, engine = fleet.workload, Engine(fleet.deployment)
    draw = workload.requester(f"replica {number}")
    num_left = _share(workload.requests, number, fleet.replicas)
    ready = [0.0] * _share(workload.clients or 0, number, fleet.replicas)
    heapify(ready)
    while True:
        arrives_at = ready[0] if ready and num_left else math.inf
        if arrives_at <= engine.next_event:
            if arrives_at == math.inf:
                return engine.metrics
            heappop(ready)
            num_left -= 1
            if not engine.arrive(draw.request(arrives_at)):
                heappush(ready, arrives_at + workload.think_seconds)
        elif not engine.fast_forward(arrives_at):
            for _ in range(engine.step()):
                heappush(ready, engine.now + workload.think_seconds)


def _share(number: int, index: int, of: int) -> int:
    """The share of part `index`, if `number` is divided into so many parts."""
    return number // of + (index < number % of)


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
