"""Figures of the stages with their details, written as a line of JSON each as soon as they are known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHECK = "check"
"""The kind of a figure that must not exceed `most`."""
KERNEL = "kernel"
"""The kind of a figure of a compiled kernel."""
UNCHECKED = "unchecked"
"""The kind of a check that could not be made; the detail `reason` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value."""

    name: str
    value: float
    unit: str
    kind: str = ""
    """The goal that it belongs to, or empty."""
    most: float = 0.0
    """The largest value with which a CHECK holds."""
    detail: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0
    """When its measuring began, in seconds since the epoch; 0 before it is written."""
    ended: float = 0.0

    def text(self) -> str:
        """One line of text."""
        if self.kind == UNCHECKED:
            return f"{self.name}: not checked, {self.detail['reason']}"
        parts = ", ".join(f"{key} {shown(value)}" for key, value in self.detail.items())
        return f"{self.name}: {shown(self.value)} {self.unit}" + (f" ({parts})" if parts else "")


def check(
    name: str,
    value: float,
    unit: str,
    detail: Mapping[str, object] | None = None,
    *,
    most: float = 0.0,
) -> Figure:
    """A figure that must not exceed `most`; NaN counts as infinity."""
    bounded = math.inf if math.isnan(value) else float(value)
    return Figure(
        name=name, value=bounded, unit=unit, kind=CHECK, most=most, detail=dict(detail or {})
    )


def unchecked(name: str, reason: str) -> Figure:
    """A check that could not be made."""
    return Figure(name=name, value=0.0, unit="", kind=UNCHECKED, detail={"reason": reason})


def shown(value: object) -> str:
    """A number with four digits, anything else as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def append(path: Path, figure: Figure) -> None:
    """Add a line."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(figure)) + "\n")


def read(path: Path) -> list[Figure]:
    """The last figure of each name; an incomplete last line does not count, because its writer may have been killed."""
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    figures = (Figure(**json.loads(line)) for line in lines)
    return list({figure.name: figure for figure in figures}.values())
