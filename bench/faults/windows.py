"""Latencies by windows of time, and their drift. Pure."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.load.measurement import Quantiles


@dataclass(slots=True)
class Window:
    """The latencies of one window, in seconds."""

    first_tokens: array[float] = field(default_factory=lambda: array("d"))
    between_tokens: array[float] = field(default_factory=lambda: array("d"))
    num_answers: int = 0
    num_tokens: int = 0
    num_kills: int = 0

    def row(self) -> dict[str, float]:
        """Its figures; latencies in milliseconds."""
        first, between = Quantiles.of(self.first_tokens), Quantiles.of(self.between_tokens)
        return {
            "answers": self.num_answers,
            "tokens": self.num_tokens,
            "kills": self.num_kills,
            "TTFT p50, ms": first.p50,
            "TTFT p90, ms": first.p90,
            "between tokens p50, ms": between.p50,
            "between tokens p90, ms": between.p90,
        }


class Windows:
    """Windows of equal length from the start on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._windows: defaultdict[int, Window] = defaultdict(Window)

    def at(self, seconds: float) -> Window:
        """The window of a moment, in seconds after the start."""
        return self._windows[int(seconds // self.seconds)]

    def rows(self) -> list[tuple[float, dict[str, float]]]:
        """Minutes after the start at which each window began, and its figures."""
        return [
            (place * self.seconds / 60, window.row())
            for place, window in sorted(self._windows.items())
        ]


def drift(rows: Iterable[dict[str, float]], title: str) -> float | None:
    """Mean of the last third of the windows over that of the first third; None for fewer than three windows."""
    values = [row[title] for row in rows]
    third = len(values) // 3
    if not third or not sum(values[:third]):
        return None
    return sum(values[-third:]) / sum(values[:third])
