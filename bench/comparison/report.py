"""The results of a run: medians as JSON, and tables with each peer's ratio to ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.comparison.cases import BATCH
from bench.comparison.offline import Row
from bench.comparison.roofline import Machine
from bench.harness.checkpoints import SHAPES, Shape
from bench.harness.repeats import Repeated, Sample, figure, ratio_text
from bench.harness.tables import markdown
from bench.peers.engines import OURS
from millrace.load.measurement import Measurement

CASE_COLUMNS = (
    "case",
    "engine",
    "unit",
    "median",
    "all",
    "ours is better by",
    "roofline",
    "share of it",
)
LEVEL_COLUMNS = (
    "level",
    "server",
    "tok/s",
    "all",
    "ours / theirs",
    "TTFT ms p50 / p90 / p99",
    "between tokens ms p50 / p90 / p99",
    "p99 / p50",
    "failed",
    "other cores",
)


def case_table(rows: Sequence[Row], shape: Shape, machine: Machine) -> str:
    """Engines without HTTP, case by case; a `~` marks a disturbed figure."""
    ours = {row.case.name: row.repeated for row in rows if row.engine == OURS}
    names = list(dict.fromkeys(row.case.name for row in rows))
    lines = []
    for name in names:
        for row in (row for row in rows if row.case.name == name):
            floor, found = row.case.floor(shape, machine), row.repeated
            better = ratio_text(ours.get(name), found)
            if not row.case.figure.more_is_better:
                better = ratio_text(found, ours.get(name))
            lines.append(
                (
                    name,
                    row.engine,
                    row.case.figure.value,
                    found.text,
                    found.all_text(),
                    "" if row.engine == OURS else better,
                    figure(floor),
                    f"{100 * share_of_roofline(row, shape, machine):.0f} %",
                )
            )
    return markdown(CASE_COLUMNS, lines)


def share_of_roofline(row: Row, shape: Shape, machine: Machine) -> float:
    """The shortest possible time over the measured time: 1 at the roofline."""
    floor, median = row.case.floor(shape, machine), row.repeated.median
    return median / floor if row.case.figure.more_is_better else floor / median


def level_table(measurements: Sequence[Measurement]) -> str:
    """Servers, level by level; latencies are medians over the repetitions of each quantile."""
    keys = list(dict.fromkeys((m.level, m.server) for m in measurements))
    levels = list(dict.fromkeys(level for level, _ in keys))
    rates = {key: rate(measurements, *key) for key in keys}
    lines = [
        _level_row(measurements, rates, level=level, server=server)
        for wanted in levels
        for level, server in keys
        if level == wanted
    ]
    return markdown(LEVEL_COLUMNS, lines)


def rate(measurements: Sequence[Measurement], level: str, server: str) -> Repeated:
    """Tokens a second of one level on one server; ValueError without a measurement."""
    return over(measurements, level, server, lambda m: m.tokens_per_second)


def over(
    measurements: Sequence[Measurement],
    level: str,
    server: str,
    value: Callable[[Measurement], float],
) -> Repeated:
    """One figure of all repetitions of a level on a server; ValueError without a measurement."""
    return Repeated(
        tuple(
            Sample(value(m), m.other_cores)
            for m in measurements
            if (m.level, m.server) == (level, server)
        )
    )


def stretch(measurement: Measurement) -> float:
    """p99 over p50 of the time between tokens; 0 for streams of one token."""
    between = measurement.between_tokens_ms
    return between.p99 / between.p50 if between.p50 else 0.0


def _level_row(
    measurements: Sequence[Measurement],
    rates: dict[tuple[str, str], Repeated],
    *,
    level: str,
    server: str,
) -> tuple[str, ...]:
    def middle(value: Callable[[Measurement], float]) -> float:
        return over(measurements, level, server, value).median

    same = [m for m in measurements if (m.level, m.server) == (level, server)]
    found = rates[level, server]
    first = (
        middle(lambda m: m.first_token_ms.p50),
        middle(lambda m: m.first_token_ms.p90),
        middle(lambda m: m.first_token_ms.p99),
    )
    between = (
        middle(lambda m: m.between_tokens_ms.p50),
        middle(lambda m: m.between_tokens_ms.p90),
        middle(lambda m: m.between_tokens_ms.p99),
    )
    return (
        level,
        server,
        found.text,
        found.all_text(),
        "" if server == OURS else ratio_text(rates.get((level, OURS)), found),
        " / ".join(f"{value:.0f}" for value in first),
        " / ".join(f"{value:.1f}" for value in between),
        f"{middle(stretch):.2f}",
        str(sum(len(m.failures) for m in same)),
        f"{max(m.other_cores for m in same):.2f}",
    )


def levels_json(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Plain containers: each level on each server, medians over its repetitions."""
    return [
        {
            "server": server,
            "level": level,
            "num_requests": same[0].num_requests,
            "failures": sum(len(each.failures) for each in same),
            "tokens_per_second": rate(same, level, server).as_json(),
            **{
                name: {
                    share: median(getattr(getattr(each, name), share) for each in same)
                    for share in ("p50", "p90", "p99")
                }
                for name in ("first_token_ms", "between_tokens_ms", "total_ms")
            },
            "client_cores": median(each.client_cores for each in same),
        }
        for level, server in dict.fromkeys((m.level, m.server) for m in measurements)
        if (same := [m for m in measurements if (m.level, m.server) == (level, server)])
    ]


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
                    **row.repeated.as_json(),
                    "roofline": row.case.floor(shape, self.machine),
                    "share_of_roofline": share_of_roofline(row, shape, self.machine),
                }
                for row in self.rows
            ],
            "measurements": levels_json(self.measurements),
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
