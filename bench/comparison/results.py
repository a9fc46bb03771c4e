"""The results of a run for one shape: every sample as JSON, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.comparison.cases import BATCH
from bench.comparison.offline import Row
from bench.comparison.report import case_table, level_table, rate, share_of_roofline
from bench.comparison.roofline import Machine
from bench.harness.checkpoints import SHAPES
from bench.harness.repeats import ratio_text
from millrace.load.measurement import Measurement


@dataclass(slots=True, kw_only=True)
class Results:
    """The results of one run for one shape."""

    model: str
    machine: Machine
    rows: Sequence[Row] = ()
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
    """The share of its rate that each engine keeps over HTTP, on the requests of `BATCH`."""
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
