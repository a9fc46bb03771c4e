"""The table of a run, with each peer's ratio to our server."""

from __future__ import annotations

from collections.abc import Sequence

from bench.measurement import Measurement

OURS = "millrace"
BUSY_CORES = 0.1
COLUMNS = (
    "level",
    "server",
    "tok/s",
    "ours / theirs",
    "TTFT ms p50 / p90 / p99",
    "between tokens ms p50 / p90 / p99",
    "failed",
    "other cores",
)


def table(measurements: Sequence[Measurement]) -> str:
    """A Markdown table, level by level; a `~` marks a figure taken while others used the cores."""
    ours = {m.level: m for m in measurements if m.server == OURS}
    levels = list(dict.fromkeys(m.level for m in measurements))
    rows = [_row(m, ours.get(level)) for level in levels for m in measurements if m.level == level]
    widths = [max(len(row[i]) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    lines = [_line(COLUMNS, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"


def _row(measurement: Measurement, ours: Measurement | None) -> tuple[str, ...]:
    busy = "~" if measurement.other_cores > BUSY_CORES else ""
    ratio = ""
    if ours is not None and measurement.server != OURS and measurement.tokens_per_second:
        ratio = f"{ours.tokens_per_second / measurement.tokens_per_second:.2f}"
    first, between = measurement.first_token_ms, measurement.between_tokens_ms
    return (
        measurement.level,
        measurement.server,
        f"{busy}{measurement.tokens_per_second:.1f}",
        ratio,
        f"{first.p50:.0f} / {first.p90:.0f} / {first.p99:.0f}",
        f"{between.p50:.1f} / {between.p90:.1f} / {between.p99:.1f}",
        str(len(measurement.failures)),
        f"{measurement.other_cores:.2f}",
    )
