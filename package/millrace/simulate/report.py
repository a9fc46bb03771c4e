"""Results as a table, as JSON and as a plot: a column, an object or a place on the axis for each point of a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.charts.lines import Panel, curves
from millrace.charts.svg import short
from millrace.simulate.metrics import SimulationMetrics
from millrace.simulate.simulation import Sweep


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of the results."""

    name: str
    """Short and unique; the key in JSON."""
    title: str
    """The title, with its unit."""
    of: Callable[[SimulationMetrics], float]


def _seconds(metrics: SimulationMetrics) -> float:
    return max(metrics.ended_at - metrics.started_at, 1e-9)


def _busy(metrics: SimulationMetrics) -> float:
    return max(metrics.busy_seconds, 1e-9)


def _hit_share(metrics: SimulationMetrics) -> float:
    """The cached share of all input tokens of admitted requests, replays included."""
    return metrics.cached_tokens / max(1, metrics.cached_tokens + metrics.prefill_tokens)


FIGURES = (
    Figure("tokens_per_second", "output tokens/s", lambda t: t.output_tokens / _seconds(t)),
    Figure("requests_per_second", "requests/s", lambda t: t.finished / _seconds(t)),
    Figure("ttft_p50", "TTFT p50, s", lambda t: t.first_token.percentile(50)),
    Figure("ttft_p90", "TTFT p90, s", lambda t: t.first_token.percentile(90)),
    Figure("ttft_p99", "TTFT p99, s", lambda t: t.first_token.percentile(99)),
    Figure("itl_p50", "ITL p50, s", lambda t: t.between_tokens.percentile(50)),
    Figure("itl_p99", "ITL p99, s", lambda t: t.between_tokens.percentile(99)),
    Figure("queue_p50", "queue p50, s", lambda t: t.queue.percentile(50)),
    Figure("queue_p99", "queue p99, s", lambda t: t.queue.percentile(99)),
    Figure("latency_p50", "latency p50, s", lambda t: t.latency.percentile(50)),
    Figure("latency_p99", "latency p99, s", lambda t: t.latency.percentile(99)),
    Figure("batch_size", "batch size, mean", lambda t: t.row_seconds / _busy(t)),
    Figure("kv_use", "KV use, mean", lambda t: t.kv_seconds / _busy(t)),
    Figure("kv_use_max", "KV use, max", lambda t: t.kv_max),
    Figure("busy", "busy share", lambda t: t.busy_seconds / _seconds(t) / max(1, t.replicas)),
    Figure("cache_hit_share", "cache hits, share", _hit_share),
    Figure("prefill_tokens", "prefill tokens", lambda t: float(t.prefill_tokens)),
    Figure("preemptions", "preemptions", lambda t: float(t.preemptions)),
    Figure("adapter_loads", "adapter loads", lambda t: float(t.adapter_loads)),
    Figure("finished", "finished", lambda t: float(t.finished)),
    Figure("rejected", "rejected", lambda t: float(sum(t.rejected.values()))),
)


SHOWN = 10
"""Most tenants in the table; JSON has all of them."""


def table(sweeps: Sequence[Sweep], results: Sequence[SimulationMetrics]) -> str:
    """A row for each figure and a column for each point; below, rejections by reason, and TTFT of the first tenants."""
    rows = [
        [sweep.flag, *(point[place] for point in Sweep.points(sweeps))]
        for place, sweep in enumerate(sweeps)
    ]
    rows += [[figure.title, *(short(figure.of(t)) for t in results)] for figure in FIGURES]
    for reason in sorted({reason for metrics in results for reason in metrics.rejected}):
        rows.append([f"  {reason}", *(short(float(t.rejected[reason])) for t in results)])
    for tenant in sorted({tenant for metrics in results for tenant in metrics.first_token_of})[
        :SHOWN
    ]:
        cells = [short(_ttft_p90(metrics, tenant)) for metrics in results]
        rows.append([f"TTFT p90, s, tenant {tenant}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        row[0].ljust(widths[0])
        + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def as_json(sweeps: Sequence[Sweep], results: Sequence[SimulationMetrics]) -> str:
    """A list of objects: the swept flags under `point`, and every figure by its name."""
    names = [sweep.flag for sweep in sweeps]
    points = [
        {"point": dict(zip(names, point, strict=True))}
        | {figure.name: figure.of(metrics) for figure in FIGURES}
        | {
            "rejected_by_reason": dict(metrics.rejected),
            "ttft_p90_by_tenant": {
                tenant: _ttft_p90(metrics, tenant) for tenant in sorted(metrics.first_token_of)
            },
        }
        for point, metrics in zip(Sweep.points(sweeps), results, strict=True)
    ]
    return json.dumps(points, indent=2) + "\n"


def plot(sweeps: Sequence[Sweep], results: Sequence[SimulationMetrics]) -> str:
    """An SVG document: the first sweep along the axis, and a line for each value of the second."""
    axis, points = sweeps[0], Sweep.points(sweeps)
    lines: dict[str, list[SimulationMetrics]] = {}
    for point, metrics in zip(points, results, strict=True):
        name = f"{sweeps[1].flag} {point[1]}" if len(sweeps) > 1 else ""
        lines.setdefault(name, []).append(metrics)
    panels = [
        Panel(
            title=figure.title,
            points={
                name: [(place, figure.of(metrics)) for place, metrics in enumerate(line)]
                for name, line in lines.items()
            },
            x_title=axis.flag,
            labels=axis.values,
        )
        for figure in FIGURES
    ]
    return curves("Simulated " + " and ".join(s.flag for s in sweeps), panels, num_columns=2)


def _ttft_p90(metrics: SimulationMetrics, tenant: str) -> float:
    distribution = metrics.first_token_of.get(tenant)
    return 0.0 if distribution is None else distribution.percentile(90)
