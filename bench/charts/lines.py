"""Line charts as SVG text: one panel under the other, one line per series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.charts.svg import (
    COLOURS,
    FAINT,
    WIDTH,
    colour_of,
    document,
    legend,
    line,
    short,
    text,
)

PANEL_HEIGHT = 260
MARGIN_LEFT = 60
MARGIN_RIGHT = 30
MARGIN_TOP = 70
AREA = 180
NUM_GRID_LINES = 4
Points = Mapping[str, Sequence[tuple[float, float]]]
"""(x, y) by series, in order of x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines over one axis."""

    title: str
    points: Points
    x_title: str
    doubles: bool = False
    """Whether x is on a logarithmic axis; all x are then above zero."""


def curves(title: str, panels: Sequence[Panel]) -> str:
    """An SVG document."""
    series = list(dict.fromkeys(name for panel in panels for name in panel.points))
    parts = legend(series)
    for row, panel in enumerate(panels):
        parts += _panel(panel, series, top=MARGIN_TOP + row * PANEL_HEIGHT)
    return document(title, parts, height=MARGIN_TOP + PANEL_HEIGHT * len(panels))


def _panel(panel: Panel, series: Sequence[str], *, top: int) -> list[str]:
    every = [point for points in panel.points.values() for point in points]
    parts = [text(20, top + 16, panel.title)]
    if not every:
        return parts
    place = math.log2 if panel.doubles else float
    xs = sorted({x for x, _ in every})
    low, high = place(xs[0]), place(xs[-1])
    width = WIDTH - MARGIN_LEFT - MARGIN_RIGHT
    floor = top + 30 + AREA
    most = max(y for _, y in every) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        share = (place(x) - low) / (high - low) if high > low else 0.5
        return MARGIN_LEFT + share * width, floor - y / most * AREA

    for step in range(NUM_GRID_LINES + 1):
        value = most * step / NUM_GRID_LINES
        _, y = at(xs[0], value)
        parts.append(line(MARGIN_LEFT, y, WIDTH - MARGIN_RIGHT, y, FAINT))
        parts.append(text(MARGIN_LEFT - 6, y + 4, short(value), anchor="end"))
    marked = xs if len(xs) <= 16 else xs[:: len(xs) // 8]
    parts += [text(at(x, 0)[0], floor + 18, short(x), anchor="middle") for x in marked]
    parts.append(text(MARGIN_LEFT + width / 2, floor + 36, panel.x_title, anchor="middle"))
    for name, points in panel.points.items():
        colour = colour_of(series.index(name))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        if len(points) <= len(COLOURS) * 4:
            for x, y in (at(*point) for point in points):
                parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>")
    return parts
