"""What a run found about one shape: every sample as JSON, charts, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.charts.bars import Panel as Bars
from bench.charts.bars import bars, chart
from bench.charts.lines import Panel as Lines
from bench.charts.lines import curves
from bench.comparison.cases import BATCH
from bench.comparison.offline import Row
from bench.comparison.report import case_table, level_table, rate, share_of_roofline
from bench.comparison.roofline import Machine
from bench.harness.checkpoints import SHAPES
from bench.harness.levels import Level
from bench.harness.measurement import PERCENTILES, Measurement
from bench.harness.repeats import ratio_text


@dataclass(slots=True, kw_only=True)
class Results:
    """Everything that one run found out about one shape."""

    model: str
    machine: Machine
    rows: Sequence[Row] = ()
    levels: Sequence[Level] = ()
    measurements: Sequence[Measurement] = ()
    notes: Sequence[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Plain containers."""
        shape = SHAPES[self.model]
        return {
            "model": self.model,
            "roofline": self.machine.as_json(),
            "offline": [
                {
                    "case": row.case.name,
                    "engine": row.engine,
                    "unit": row.case.figure.value,
                    "median": row.repeated.median,
                    "is_clean": row.repeated.is_clean,
                    "samples": [[s.value, s.other_cores] for s in row.samples],
                    "roofline": row.case.floor(shape, self.machine),
                    "share_of_roofline": share_of_roofline(row, shape, self.machine),
                }
                for row in self.rows
            ],
            "measurements": [measurement.as_json() for measurement in self.measurements],
            "notes": list(self.notes),
        }


def write_charts(results: Results, facts: Mapping[str, str], folder: Path) -> None:
    """The charts that its figures allow; `facts` are those of the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    where = f"{results.model}, bfloat16, on {facts['cpu']} ({facts['cores']})"
    if results.rows:
        (folder / f"{results.model}-roofline.svg").write_text(roofline_chart(where, results))
    if results.measurements:
        (folder / f"{results.model}.svg").write_text(chart(where, results.measurements))
        (folder / f"{results.model}-concurrency.svg").write_text(concurrency_chart(where, results))
        (folder / f"{results.model}-latency.svg").write_text(latency_chart(where, results))


def roofline_chart(where: str, results: Results) -> str:
    """How much of the least possible time each engine needs, case by case."""
    shape = SHAPES[results.model]
    shares = {
        (row.case.name, row.engine): 100 * share_of_roofline(row, shape, results.machine)
        for row in results.rows
    }
    title = "Percent of the roofline measured in the same run (100 is the line)"
    return bars(where, [Bars(title, shares, reference=100.0)])


def concurrency_chart(where: str, results: Results) -> str:
    """Tokens a second of the closed loops, a panel for each pair of lengths."""
    panels = []
    loops = [level for level in results.levels if level.concurrency is not None]
    for lengths in dict.fromkeys((loop.prompt_tokens, loop.new_tokens) for loop in loops):
        same = [loop for loop in loops if (loop.prompt_tokens, loop.new_tokens) == lengths]
        points: dict[str, list[tuple[float, float]]] = {}
        for loop in sorted(same, key=lambda loop: loop.concurrency or 0):
            for server in dict.fromkeys(m.server for m in results.measurements):
                if any((m.level, m.server) == (loop.name, server) for m in results.measurements):
                    found = rate(results.measurements, loop.name, server).median
                    points.setdefault(server, []).append((float(loop.concurrency or 0), found))
        title = f"Output tokens per second, {lengths[0]} tokens in and {lengths[1]} out"
        panels.append(Lines(title=title, points=points, x_title="clients", doubles=True))
    return curves(where, panels)


def latency_chart(where: str, results: Results) -> str:
    """Percentiles of both latencies, a pair of panels for each level; the last repetition of each."""
    panels = []
    for level in dict.fromkeys(m.level for m in results.measurements):
        last = {m.server: m for m in results.measurements if m.level == level}
        for title, values in (
            ("time to first token", {s: m.first_token_percentiles for s, m in last.items()}),
            ("between tokens", {s: m.between_tokens_percentiles for s, m in last.items()}),
        ):
            points = {
                server: [(float(p), ms) for p, ms in zip(PERCENTILES, found, strict=True)]
                for server, found in values.items()
                if found
            }
            panels.append(Lines(title=f"{level}: {title}, ms", points=points, x_title="percentile"))
    return curves(where, panels)


def text(results: Results) -> str:
    """Tables and notes for people."""
    parts = [f"In the same run: {results.machine.text()}."]
    if results.rows:
        parts += [
            "Engines without HTTP; medians of the repetitions that nothing disturbed:",
            case_table(results.rows, SHAPES[results.model], results.machine),
        ]
    if results.measurements:
        parts += ["Served over HTTP:", level_table(results.measurements)]
    parts += served_against_offline(results)
    parts += [f"Note: {note}" for note in results.notes]
    return "\n\n".join(parts)


def served_against_offline(results: Results) -> list[str]:
    """Who was measured both ways on the requests of `BATCH`, and what HTTP left of its rate."""
    lines = []
    for row in results.rows:
        served = [
            m for m in results.measurements if (m.level, m.server) == (BATCH.name, row.engine)
        ]
        if row.case.name == BATCH.name and served:
            both = rate(results.measurements, BATCH.name, row.engine)
            lines.append(
                f"{row.engine}: {both.text} tok/s served and {row.repeated.text} offline on the same requests"
                f" ({BATCH.name}), ratio {ratio_text(both, row.repeated)}."
            )
    return lines
