"""Grouped bars as SVG text: one panel per figure, one group per case, one bar per server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.charts.svg import LINE, WIDTH, colour_of, document, legend, line, rectangle, short, text
from bench.harness.measurement import Measurement
from bench.harness.repeats import Repeated, Sample

PANEL_HEIGHT = 210
MARGIN_LEFT = 60
MARGIN_TOP = 70
BAR_AREA = 130


@dataclass(frozen=True, slots=True)
class Panel:
    """Values by (group, series), on a scale of their own."""

    title: str
    values: Mapping[tuple[str, str], float]
    reference: float | None = None
    """Where to draw a line across, such as the roofline."""


FIGURES: tuple[tuple[str, Callable[[Measurement], float]], ...] = (
    ("Output tokens per second (more is better)", lambda m: m.tokens_per_second),
    ("Time to first token, p50, ms (less is better)", lambda m: m.first_token_ms.p50),
    ("Between tokens, p50, ms (less is better)", lambda m: m.between_tokens_ms.p50),
)


def chart(title: str, measurements: Sequence[Measurement]) -> str:
    """An SVG document of load levels: medians of their repetitions."""
    panels = []
    for name, value in FIGURES:
        samples: dict[tuple[str, str], list[Sample]] = {}
        for m in measurements:
            samples.setdefault((m.level, m.server), []).append(Sample(value(m), m.other_cores))
        panels.append(
            Panel(name, {key: Repeated(tuple(found)).median for key, found in samples.items()})
        )
    return bars(title, panels)


def bars(title: str, panels: Sequence[Panel]) -> str:
    """An SVG document with one panel under the other."""
    series = list(dict.fromkeys(name for panel in panels for _, name in panel.values))
    parts = legend(series)
    for row, panel in enumerate(panels):
        parts += _panel(panel, series, top=MARGIN_TOP + row * PANEL_HEIGHT)
    return document(title, parts, height=MARGIN_TOP + PANEL_HEIGHT * len(panels))


def _panel(panel: Panel, series: Sequence[str], *, top: int) -> list[str]:
    groups = list(dict.fromkeys(group for group, _ in panel.values))
    scale = BAR_AREA / max([*panel.values.values(), panel.reference or 0.0, 1e-9])
    floor = top + 35 + BAR_AREA
    width = (WIDTH - MARGIN_LEFT - 20) / max(len(groups), 1)
    bar = min(48.0, width * 0.8 / max(len(series), 1))
    parts = [
        text(20, top + 16, panel.title),
        line(MARGIN_LEFT, floor, WIDTH - 20, floor),
    ]
    if panel.reference is not None:
        y = floor - panel.reference * scale
        parts.append(line(MARGIN_LEFT, y, WIDTH - 20, y, LINE))
    for column, group in enumerate(groups):
        left = MARGIN_LEFT + column * width
        parts.append(text(left + width / 2, floor + 18, group, anchor="middle"))
        present = [name for name in series if (group, name) in panel.values]
        start = left + width / 2 - bar * len(present) / 2
        for position, name in enumerate(present):
            value = panel.values[group, name]
            x, tall = start + position * bar, value * scale
            colour = colour_of(series.index(name))
            parts.append(rectangle(x + 1, floor - tall, bar - 2, tall, colour))
            parts.append(text(x + bar / 2, floor - tall - 4, short(value), anchor="middle"))
    return parts
