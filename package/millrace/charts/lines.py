"""Line charts as SVG text: panels in columns, one line per series, and a dashed one for its prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.charts.svg import (
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
MOST_MARKS = 10
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
    rounds: bool = False
    """Whether round numbers are marked on the x axis, and not the x of the points."""
    labels: Sequence[str] = ()
    """The names of x = 0, 1, 2 and so on, where x is not a number."""
    simulated: Points = field(default_factory=dict)
    """Predicted points of the same series, drawn as dashed lines with hollow marks."""


def curves(title: str, panels: Sequence[Panel], *, num_columns: int = 1) -> str:
    """An SVG document; the panels fill its rows from left to right."""
    series = list(dict.fromkeys(name for p in panels for name in (*p.points, *p.simulated)))
    parts = legend(series)
    width = WIDTH // num_columns
    for number, panel in enumerate(panels):
        row, column = divmod(number, num_columns)
        x, y = column * width, MARGIN_TOP + row * PANEL_HEIGHT
        parts += [
            f"<g transform='translate({x} {y})'>",
            *_panel(panel, series, width=width),
            "</g>",
        ]
    num_rows = math.ceil(len(panels) / num_columns)
    return document(title, parts, height=MARGIN_TOP + PANEL_HEIGHT * num_rows)


def round_numbers(low: float, high: float, *, doubles: bool) -> list[float]:
    """1, 2 or 5 times a power of ten, between `low` and `high`: every one, or evenly apart on a linear axis."""
    if doubles:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = [first * 10.0**power for power in powers for first in (1, 2, 5)]
        return [step for step in steps if low <= step <= high]
    least = (high - low) / MOST_MARKS or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    step = power * next(first for first in (1, 2, 5, 10) if first * power >= least)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _panel(panel: Panel, series: Sequence[str], *, width: int) -> list[str]:
    """The panel from its own corner on; it is `width` wide."""
    drawn = [*panel.points.values(), *panel.simulated.values()]
    every = [point for points in drawn for point in points]
    parts = [text(20, 16, panel.title)]
    if not every:
        return parts
    place = math.log2 if panel.doubles else float
    xs = sorted({x for x, _ in every})
    low, high = place(xs[0]), place(xs[-1])
    right = width - MARGIN_RIGHT
    floor = 30 + AREA
    most = max(y for _, y in every) or 1.0

    def at(point: tuple[float, float]) -> tuple[float, float]:
        share = (place(point[0]) - low) / (high - low) if high > low else 0.5
        return MARGIN_LEFT + share * (right - MARGIN_LEFT), floor - point[1] / most * AREA

    for step in range(NUM_GRID_LINES + 1):
        value = most * step / NUM_GRID_LINES
        _, y = at((xs[0], value))
        parts.append(line(MARGIN_LEFT, y, right, y, FAINT))
        parts.append(text(MARGIN_LEFT - 6, y + 4, short(value), anchor="end"))
    if panel.rounds:
        marked = round_numbers(xs[0], xs[-1], doubles=panel.doubles)
    else:
        most = 16 * width // WIDTH
        marked = xs if len(xs) <= most else xs[:: 2 * len(xs) // most]
    for x in marked:
        label = panel.labels[int(x)] if panel.labels else short(x)
        parts.append(text(at((x, 0))[0], floor + 18, label, anchor="middle"))
    parts.append(text((MARGIN_LEFT + right) / 2, floor + 36, panel.x_title, anchor="middle"))
    if panel.simulated:
        parts.append(text(right, 16, "dashed: simulated", anchor="end"))
    for points, is_simulated in ((panel.points, False), (panel.simulated, True)):
        for name, line_of in points.items():
            colour = colour_of(series.index(name))
            parts += _series(list(map(at, line_of)), colour, is_simulated=is_simulated)
    return parts


def _series(places: Sequence[tuple[float, float]], colour: str, *, is_simulated: bool) -> list[str]:
    """A line through `places`, in the units of the document, and a mark at each unless they are many."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = " stroke-dasharray='5 4'" if is_simulated else ""
    fill = f"#ffffff' stroke='{colour}" if is_simulated else colour
    parts = [f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'{dashes}/>"]
    if len(places) <= len(COLOURS) * 4:
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{fill}'/>" for x, y in places]
    return parts
