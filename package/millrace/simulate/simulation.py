"""One server of several under a workload that is divided among them, and sweeps over flags."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice, product
from multiprocessing import get_context
from typing import Self

from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.metrics import SimulationMetrics
from millrace.simulate.workload import ClosedLoop, OpenLoop, Source, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A workload that `replicas` like servers get in turn, of which the first is simulated."""

    deployment: Deployment
    workload: Workload
    replicas: int = 1

    def source(self) -> Source:
        """The requests of the first replica."""
        workload = self.workload
        if workload.clients is None:
            return OpenLoop(islice(workload.arrivals(), 0, None, self.replicas))
        return ClosedLoop(
            workload.requester("replica 0"),
            requests=math.ceil(workload.requests / self.replicas),
            clients=math.ceil(workload.clients / self.replicas),
            think_seconds=workload.think_seconds,
            ramp_seconds=workload.ramp_seconds,
        )


def simulate(
    simulations: Sequence[Simulation], *, processes: int = 1
) -> Iterator[SimulationMetrics]:
    """Run the simulations in up to `processes` processes; yield the figures of each, scaled up to its replicas.

    Raises:
        TraceError: a trace is invalid.
        StuckError: the scheduler has a defect.

    """
    if processes == 1 or len(simulations) == 1:
        yield from map(_simulate, simulations)
        return
    with ProcessPoolExecutor(min(processes, len(simulations)), get_context("spawn")) as pool:
        yield from pool.map(_simulate, simulations)


def _simulate(simulation: Simulation) -> SimulationMetrics:
    # The engine makes many objects, but no cycles.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        metrics = serve(Engine(simulation.deployment), simulation.source())
    finally:
        if was_enabled:
            gc.enable()
    metrics.scale(simulation.replicas)
    return metrics


def serve(engine: Engine, source: Source) -> SimulationMetrics:
    """Let `engine` serve all requests; return its figures. Raises TraceError and StuckError as `simulate`."""
    while True:
        while engine.next_event < source.next_at:
            for _ in range(engine.step()):
                source.left(engine.now)
        if source.next_at == math.inf:
            return engine.metrics
        arrival = source.take()
        if engine.arrive(arrival) is None:
            source.left(engine.now)


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
        parts = tuple(value.strip() for value in values.split(","))
        if not flag or not equals or not all(parts):
            raise ValueError(f"{text!r} is not a sweep: use FLAG=VALUE,VALUE")
        return cls(flag.strip().lstrip("-").replace("_", "-"), parts)

    @property
    def field(self) -> str:
        return self.flag.replace("-", "_")

    @staticmethod
    def points(sweeps: Sequence[Sweep]) -> list[tuple[str, ...]]:
        """Every combination of values, in which the first sweep changes last; one empty combination without sweeps."""
        return list(product(*(sweep.values for sweep in sweeps)))
