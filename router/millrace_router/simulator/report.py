"""Results as a table, as JSON and as a plot: a column, an object or a place on the axis for each point of a sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence

from millrace_router.simulator.figures import FIGURES
from millrace_router.simulator.svg import Panel, chart, short
from millrace_router.simulator.sweep import Sweep
from millrace_router.simulator.tally import Tally

SHOWN = 10
"""Tenants in the table; JSON has them all."""


def table(sweeps: Sequence[Sweep], tallies: Sequence[Tally]) -> str:
    """Figures down, points across; below, why requests were rejected, and what the first tenants saw."""
    rows = [
        [sweep.flag, *(point[place] for point in Sweep.points(sweeps))]
        for place, sweep in enumerate(sweeps)
    ]
    rows += [[figure.title, *(short(figure.of(t)) for t in tallies)] for figure in FIGURES]
    for reason in sorted({reason for tally in tallies for reason in tally.rejected}):
        rows.append([f"  {reason}", *(short(float(t.rejected[reason])) for t in tallies)])
    for tenant in sorted({tenant for tally in tallies for tenant in tally.first_token_of})[:SHOWN]:
        cells = [short(_ttft_p90(tally, tenant)) for tally in tallies]
        rows.append([f"TTFT p90, s, tenant {tenant}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        row[0].ljust(widths[0])
        + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def as_json(sweeps: Sequence[Sweep], tallies: Sequence[Tally]) -> str:
    """A list of objects: the swept flags under `point`, every figure by its name."""
    names = [sweep.flag for sweep in sweeps]
    results = [
        {"point": dict(zip(names, point, strict=True))}
        | {figure.name: figure.of(tally) for figure in FIGURES}
        | {
            "rejected_by_reason": dict(tally.rejected),
            "ttft_p90_by_tenant": {
                tenant: _ttft_p90(tally, tenant) for tenant in sorted(tally.first_token_of)
            },
        }
        for point, tally in zip(Sweep.points(sweeps), tallies, strict=True)
    ]
    return json.dumps(results, indent=2) + "\n"


def plot(sweeps: Sequence[Sweep], tallies: Sequence[Tally]) -> str:
    """An SVG document: the first sweep along the axis, a line for each value of the second."""
    axis, points = sweeps[0], Sweep.points(sweeps)
    lines: dict[str, list[Tally]] = {}
    for point, tally in zip(points, tallies, strict=True):
        name = f"{sweeps[1].flag} {point[1]}" if len(sweeps) > 1 else ""
        lines.setdefault(name, []).append(tally)
    panels = [
        Panel(
            figure.title,
            {name: [figure.of(tally) for tally in line] for name, line in lines.items()},
        )
        for figure in FIGURES
    ]
    return chart(
        "Simulated " + " and ".join(s.flag for s in sweeps), axis.flag, axis.values, panels
    )


def _ttft_p90(tally: Tally, tenant: str) -> float:
    distribution = tally.first_token_of.get(tenant)
    return 0.0 if distribution is None else distribution.percentile(90)
