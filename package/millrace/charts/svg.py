"""The parts that all charts share: no plotting library, no browser."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 860
COLOURS = ("#2f6f9f", "#d08a3c", "#6b8f47", "#8d6aa8", "#b5534c")
FONT = "font-family='sans-serif' font-size='12' fill='#24292f'"
LINE = "#8c959f"
FAINT = "#e3e7eb"


def document(title: str, parts: Sequence[str], *, height: int) -> str:
    """A whole SVG document with a headline."""
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}'"
            f" viewBox='0 0 {WIDTH} {height}' role='img'>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
            text(20, 28, title, weight="bold"),
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", weight: str = "normal") -> str:
    """One line of text whose baseline is at `y`."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-weight='{weight}'"
        f" text-anchor='{anchor}'>{escape(content)}</text>"
    )


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{colour}'/>"
    )


def line(x: float, y: float, x2: float, y2: float, colour: str = LINE) -> str:
    return f"<line x1='{x:.1f}' y1='{y:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}'/>"


def legend(names: Sequence[str], *, y: float = 40) -> list[str]:
    """A coloured square and a name for each series, in one row."""
    parts = []
    for position, name in enumerate(names):
        x = 20 + 150 * position
        parts += [rectangle(x, y, 12, 12, colour_of(position)), text(x + 18, y + 11, name)]
    return parts


def colour_of(position: int) -> str:
    """The colour of a series by its place."""
    return COLOURS[position % len(COLOURS)]


def short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
