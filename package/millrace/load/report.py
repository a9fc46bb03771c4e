"""The report of a run as JSON, as an SVG of curves, or as one HTML page with both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from millrace.charts.lines import Panel, curves
from millrace.load.measurement import Measurement, Quantiles

SUFFIXES = (".html", ".svg", ".json")
STYLE = (
    "body{font:15px sans-serif;color:#24292f;max-width:900px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid #e3e7eb}"
    "th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The levels of one run, with what was measured and how."""

    url: str
    model: str
    api: str
    is_open: bool
    """Whether levels are requests per second, and not concurrent requests."""
    settings: Mapping[str, Any]
    amounts: Sequence[float]
    """Concurrency or rate of each level."""
    measurements: Sequence[Measurement]

    def as_json(self) -> str:
        """One object: the settings, and the figures of each level."""
        value = {
            "url": self.url,
            "model": self.model,
            "api": self.api,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": dict(self.settings),
            "levels": [
                {("rate" if self.is_open else "concurrency"): amount, **measurement.as_json()}
                for amount, measurement in zip(self.amounts, self.measurements, strict=True)
            ],
        }
        return json.dumps(value, indent=2) + "\n"

    def as_svg(self) -> str:
        """Throughput and latencies over the load."""
        axis = "requests per second" if self.is_open else "concurrent requests"

        def of(read: Callable[[Measurement], float]) -> list[tuple[float, float]]:
            pairs = zip(self.amounts, self.measurements, strict=True)
            return sorted((amount, read(measurement)) for amount, measurement in pairs)

        def quantiles(
            read: Callable[[Measurement], Quantiles],
        ) -> dict[str, list[tuple[float, float]]]:
            return {
                "p50": of(lambda m: read(m).p50),
                "p90": of(lambda m: read(m).p90),
                "p99": of(lambda m: read(m).p99),
            }

        panels = (
            ("output tokens per second", {"throughput": of(lambda m: m.tokens_per_second)}),
            ("time to first token, ms", quantiles(lambda m: m.first_token_ms)),
            ("between tokens, ms", quantiles(lambda m: m.between_tokens_ms)),
            ("whole answer, ms", quantiles(lambda m: m.total_ms)),
        )
        doubles = min(self.amounts) > 0 and len(self.amounts) > 1
        return curves(
            f"{self.model} at {self.url}",
            [
                Panel(title=title, points=points, x_title=axis, doubles=doubles)
                for title, points in panels
            ],
        )

    def as_html(self) -> str:
        """A self-contained page without scripts."""
        columns = ("level", "requests", "failed", "tok/s", "first token", "between", "whole")
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        rows = "".join(f"<tr>{_cells(measurement)}</tr>" for measurement in self.measurements)
        facts = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return (
            f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(self.model)}</title>"
            f"<style>{STYLE}</style></head><body><h1>{escape(self.model)}</h1>"
            f"<p>{escape(self.url)}, API {escape(self.api)}: {escape(facts)}. Latencies are p50 / p90 / p99 in ms.</p>"
            f"<table><tr>{head}</tr>{rows}</table>{self.as_svg()}</body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the form that the suffix names. Raises OSError."""
        forms = {".html": self.as_html, ".svg": self.as_svg, ".json": self.as_json}
        path.write_text(forms[path.suffix](), encoding="utf-8")


def _cells(measurement: Measurement) -> str:
    cells = (
        measurement.level,
        str(measurement.num_requests),
        str(len(measurement.failures)),
        f"{measurement.tokens_per_second:.1f}",
        *(
            f"{each.p50:.1f} / {each.p90:.1f} / {each.p99:.1f}"
            for each in (
                measurement.first_token_ms,
                measurement.between_tokens_ms,
                measurement.total_ms,
            )
        ),
    )
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)
