"""The rows of the report, one for each comparison, and the report as a table or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace.verify.comparison import Comparison, Place, Promise, Verdict
from millrace.verify.suite import ServerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A comparison with promise and verdict, or the reason why there is none."""

    case: str
    """Its name in `--cases`."""
    title: str
    verdict: Verdict
    promise: str = ""
    comparison: Comparison | None = None
    note: str = ""


def judged(
    case: str,
    title: str,
    promise: Promise,
    comparison: Comparison,
    *,
    exercised: bool = True,
    note: str = "",
) -> Row:
    """Make a row; equality proves nothing unless the case was exercised."""
    verdict = promise.judge(comparison)
    if verdict.is_green and not exercised:
        verdict = Verdict.NOT_EXERCISED
    failures = "; ".join(comparison.failures[:2])
    return Row(
        case=case,
        title=title,
        verdict=verdict,
        promise=promise.words,
        comparison=comparison,
        note="; ".join(filter(None, (note, failures))),
    )


def unchecked(case: str, title: str, reason: str, *, asked_for: bool) -> Row:
    """Make a row for a case that did not run; it is red if the user requested the case."""
    verdict = Verdict.NOT_EXERCISED if asked_for else Verdict.NOT_CHECKED
    return Row(case=case, title=title, verdict=verdict, note=reason)


COLUMNS = ("case", "requests", "tokens", "equal", "first difference", "largest gap", "verdict")
FAST = """\
The server reports deterministic: false. In this fast mode equality is not promised, only that sent tokens are never
replaced. Answers have to agree within the tolerance of the dtype.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The rows, and the server that answered each request alone."""

    info: ServerInfo
    rows: tuple[Row, ...]

    @property
    def exit_code(self) -> int:
        """0 if every verdict is green."""
        return 0 if all(row.verdict.is_green for row in self.rows) else 1

    def as_table(self) -> str:
        """The report as a table, followed by notes."""
        info = self.info
        kind = "deterministic" if info.deterministic else "fast"
        head = (
            f"{info.model_id}: {info.dtype} on {info.device}, {info.num_shard} shard(s), {kind}, "
            f"millrace {info.version}\n"
        )
        cells = [COLUMNS, *(_cells(row) for row in self.rows)]
        notes = [f"  {row.title}: {row.note}\n" for row in self.rows if row.note]
        fast = "" if info.deterministic else f"\n{FAST}"
        return head + fast + "\n" + _aligned(cells) + "\n" + "".join(notes)

    def as_json(self) -> str:
        """The report as a JSON object; gaps that are not finite are null."""
        info = self.info
        server = {
            "model_id": info.model_id,
            "dtype": info.dtype,
            "device": info.device,
            "num_shard": info.num_shard,
            "deterministic": info.deterministic,
            "block_size": info.block_size,
            "version": info.version,
        }
        rows = [_row_json(row) for row in self.rows]
        return (
            json.dumps({"server": server, "passed": self.exit_code == 0, "rows": rows}, indent=2)
            + "\n"
        )


def _cells(row: Row) -> tuple[str, ...]:
    comparison = row.comparison
    if comparison is None:
        return (row.title, "", "", "", "", "", row.verdict.value)
    return (
        row.title,
        str(comparison.num_requests),
        str(comparison.num_tokens),
        f"{comparison.num_equal}/{comparison.num_requests}",
        _place(comparison.first_difference),
        f"{comparison.largest_gap:.2g}" if comparison.largest_gap else "0",
        f"{row.verdict.value} ({row.promise})",
    )


def _place(place: Place | None) -> str:
    if place is None:
        return "-"
    part = "prompt token" if place.in_prompt else "token"
    return f"request {place.request}, {part} {place.position}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, with numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_number = [name in ("requests", "tokens", "equal", "largest gap") for name in rows[0]]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "case": row.case,
        "title": row.title,
        "verdict": row.verdict.name.lower(),
        "passed": row.verdict.is_green,
        "promise": row.promise or None,
        "note": row.note or None,
        **({} if row.comparison is None else _comparison_json(row.comparison)),
    }


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    place = comparison.first_difference
    return {
        "requests": comparison.num_requests,
        "tokens": comparison.num_tokens,
        "requests_equal": comparison.num_equal,
        "requests_with_other_tokens": comparison.num_other_tokens,
        "first_difference": None
        if place is None
        else {
            "request": place.request,
            "in_prompt": place.in_prompt,
            "position": place.position,
        },
        "largest_gap": comparison.largest_gap if math.isfinite(comparison.largest_gap) else None,
        "failures": list(comparison.failures),
    }
