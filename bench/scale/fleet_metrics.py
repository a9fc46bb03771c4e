"""Counts of replicas and cells, and their sums over a fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from millrace.simulate.metrics import Distribution, SimulationMetrics
from millrace.simulate.report import FIGURES


@dataclass(slots=True)
class FleetMetrics(SimulationMetrics):
    """Counts and durations (in seconds) of one replica of a cell, or of several together."""

    recomputed_tokens: int = 0
    """Input tokens computed, though a replica of the cell had computed them before."""
    resent: int = 0
    """Requests whose replica failed, and which their clients sent again."""
    broken: int = 0
    """Those of them that had begun to stream."""
    load_max: int = 0
    """Tokens, cached ones included, of the replica that has most of them."""

    @property
    def load(self) -> int:
        """Tokens of prompts and answers, cached ones included."""
        return self.cached_tokens + self.prefill_tokens + self.output_tokens

    def scale(self, factor: float) -> None:
        """Multiply all counts and sums by `factor`."""
        SimulationMetrics.scale(self, factor)
        for name in ("recomputed_tokens", "resent", "broken"):
            setattr(self, name, round(getattr(self, name) * factor))


_EXTREMES = {"started_at": min, "ended_at": max, "kv_max": max, "load_max": max}


def total(results: Sequence[FleetMetrics]) -> FleetMetrics:
    """The sum over several replicas."""
    result = FleetMetrics()
    for metrics in results:
        for item in fields(FleetMetrics):
            mine, other = getattr(result, item.name), getattr(metrics, item.name)
            if isinstance(mine, Distribution):
                _merge(mine, other)
            elif isinstance(mine, Counter):
                mine.update(other)
            elif isinstance(mine, dict):
                for tenant, distribution in other.items():
                    _merge(mine.setdefault(tenant, Distribution()), distribution)
            elif item.name not in _EXTREMES:
                setattr(result, item.name, mine + other)
    if results:
        for name, choose in _EXTREMES.items():
            setattr(result, name, choose(getattr(metrics, name) for metrics in results))
    return result


def _merge(mine: Distribution, other: Distribution) -> None:
    for key, (times, seconds) in other.buckets.items():
        bucket = mine.buckets.setdefault(key, [0, 0.0])
        bucket[0] += times
        bucket[1] += seconds


@dataclass(frozen=True, slots=True)
class FleetFigure:
    """One quantity of the results, as `millrace.simulate.report.Figure`."""

    name: str
    title: str
    of: Callable[[FleetMetrics], float]


FLEET_FIGURES = (
    *(FleetFigure(figure.name, figure.title, figure.of) for figure in FIGURES),
    FleetFigure(
        "load_max_mean", "load, max/mean", lambda t: t.load_max * t.replicas / max(1, t.load)
    ),
    FleetFigure(
        "recomputed_tokens", "prompt tokens computed twice", lambda t: float(t.recomputed_tokens)
    ),
    FleetFigure("resent", "sent again after failures", lambda t: float(t.resent)),
    FleetFigure("broken", "streams broken", lambda t: float(t.broken)),
)
