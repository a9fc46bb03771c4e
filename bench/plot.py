"""Grouped bars of a benchmark as SVG text: no plotting library, no browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from bench.measurement import Measurement

WIDTH = 860
PANEL_HEIGHT = 210
MARGIN_LEFT = 60
MARGIN_TOP = 70
BAR_AREA = 130
COLOURS = ("#2f6f9f", "#d08a3c", "#6b8f47", "#8d6aa8")
FONT = "font-family='sans-serif' font-size='12' fill='#24292f'"


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of every measurement, on a scale of its own."""

    title: str
    value: Callable[[Measurement], float]


PANELS = (
    Panel("Output tokens per second (more is better)", lambda m: m.tokens_per_second),
    Panel("Time to first token, p50, ms (less is better)", lambda m: m.first_token_ms.p50),
    Panel("Between tokens, p50, ms (less is better)", lambda m: m.between_tokens_ms.p50),
)


def chart(title: str, measurements: Sequence[Measurement]) -> str:
    """An SVG document with one panel per figure, one group of bars per level."""
    servers = list(dict.fromkeys(m.server for m in measurements))
    height = MARGIN_TOP + PANEL_HEIGHT * len(PANELS)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}'"
        f" viewBox='0 0 {WIDTH} {height}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        f"<text x='20' y='28' {FONT} font-weight='bold'>{escape(title)}</text>",
    ]
    for position, server in enumerate(servers):
        x = 20 + 150 * position
        colour = COLOURS[position % len(COLOURS)]
        parts.append(f"<rect x='{x}' y='40' width='12' height='12' fill='{colour}'/>")
        parts.append(f"<text x='{x + 18}' y='51' {FONT}>{escape(server)}</text>")
    for row, panel in enumerate(PANELS):
        top = MARGIN_TOP + row * PANEL_HEIGHT
        parts += _panel(panel, measurements, servers, top=top)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    panel: Panel, measurements: Sequence[Measurement], servers: Sequence[str], *, top: int
) -> list[str]:
    levels = list(dict.fromkeys(m.level for m in measurements))
    values = {(m.level, m.server): panel.value(m) for m in measurements}
    scale = BAR_AREA / max([*values.values(), 1e-9])
    floor = top + 35 + BAR_AREA
    group = (WIDTH - MARGIN_LEFT - 20) / max(len(levels), 1)
    bar = min(48.0, group * 0.8 / max(len(servers), 1))
    parts = [
        f"<text x='20' y='{top + 16}' {FONT}>{escape(panel.title)}</text>",
        f"<line x1='{MARGIN_LEFT}' y1='{floor}' x2='{WIDTH - 20}' y2='{floor}' stroke='#8c959f'/>",
    ]
    for column, level in enumerate(levels):
        left = MARGIN_LEFT + column * group
        middle = left + group / 2
        parts.append(
            f"<text x='{middle:.1f}' y='{floor + 18}' {FONT} text-anchor='middle'>"
            f"{escape(level)}</text>"
        )
        start = middle - bar * len(servers) / 2
        for position, server in enumerate(servers):
            if (level, server) not in values:
                continue
            value = values[level, server]
            x, tall = start + position * bar, value * scale
            parts.append(
                f"<rect x='{x + 1:.1f}' y='{floor - tall:.1f}' width='{bar - 2:.1f}'"
                f" height='{tall:.1f}' fill='{COLOURS[position % len(COLOURS)]}'/>"
            )
            parts.append(
                f"<text x='{x + bar / 2:.1f}' y='{floor - tall - 4:.1f}' {FONT}"
                f" text-anchor='middle'>{_short(value)}</text>"
            )
    return parts


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
