"""Line charts as SVG text: panels in two columns, one line per series. No plotting library, no browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

NUM_COLUMNS = 2
TOP = 70
PANEL_WIDTH, PANEL_HEIGHT = 480, 220
LEFT, RIGHT = 60, 20
AREA = 145
NUM_GRID_LINES = 4
MOST_LABELS = 8
COLOURS = ("#2f6f9f", "#d08a3c", "#6b8f47", "#8d6aa8", "#b5534c")
FAINT = "#e3e7eb"


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: the values of each series, one per place on the axis."""

    title: str
    values: Mapping[str, Sequence[float]]


def chart(title: str, axis: str, labels: Sequence[str], panels: Sequence[Panel]) -> str:
    """An SVG document; `labels` name the places on the `axis`, from left to right."""
    series = list(dict.fromkeys(name for panel in panels for name in panel.values))
    width = NUM_COLUMNS * PANEL_WIDTH
    height = TOP + PANEL_HEIGHT * -(-len(panels) // NUM_COLUMNS)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}'"
        f" viewBox='0 0 {width} {height}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        _text(20, 28, title, weight="bold"),
    ]
    for position, name in enumerate(series if len(series) > 1 else ()):
        x = 20 + 200 * position
        parts.append(f"<rect x='{x}' y='40' width='12' height='12' fill='{_colour(position)}'/>")
        parts.append(_text(x + 18, 51, name))
    for number, panel in enumerate(panels):
        row, column = divmod(number, NUM_COLUMNS)
        parts.append(
            f"<g transform='translate({column * PANEL_WIDTH} {TOP + row * PANEL_HEIGHT})'>"
        )
        parts += [*_panel(panel, series, axis, labels), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def short(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _panel(panel: Panel, series: Sequence[str], axis: str, labels: Sequence[str]) -> list[str]:
    floor, width = 30 + AREA, PANEL_WIDTH - LEFT - RIGHT
    most = max((value for values in panel.values.values() for value in values), default=0.0) or 1.0
    parts = [_text(20, 16, panel.title)]
    for step in range(NUM_GRID_LINES + 1):
        y = floor - AREA * step / NUM_GRID_LINES
        parts.append(
            f"<line x1='{LEFT}' y1='{y:.1f}' x2='{PANEL_WIDTH - RIGHT}' y2='{y:.1f}' stroke='{FAINT}'/>"
        )
        parts.append(_text(LEFT - 6, y + 4, _tick(most * step / NUM_GRID_LINES), anchor="end"))
    xs = [LEFT + width * (place + 0.5) / len(labels) for place in range(len(labels))]
    every = -(-len(labels) // MOST_LABELS)
    marks = list(zip(xs, labels, strict=True))[::every]
    parts += [_text(x, floor + 16, label, anchor="middle") for x, label in marks]
    parts.append(_text(LEFT + width / 2, floor + 32, axis, anchor="middle"))
    for name, values in panel.values.items():
        colour = _colour(series.index(name))
        points = [(x, floor - y / most * AREA) for x, y in zip(xs, values, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in points]
    return parts


def _tick(value: float) -> str:
    """Three digits and a unit, which fit beside the grid."""
    if value >= 1e6:
        return f"{short(value / 1e6)}M"
    if value >= 1e4:
        return f"{short(value / 1e3)}k"
    return short(value)


def _text(x: float, y: float, content: str, *, anchor: str = "start", weight: str = "") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-family='sans-serif' font-size='12' fill='#24292f'"
        f" font-weight='{weight or 'normal'}' text-anchor='{anchor}'>{escape(content)}</text>"
    )


def _colour(position: int) -> str:
    return COLOURS[position % len(COLOURS)]
