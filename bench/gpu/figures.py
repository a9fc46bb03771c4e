"""What stages find out: figures with their details, a line of JSON each, kept as soon as they are there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value."""

    name: str
    value: float
    unit: str
    kind: str = ""
    """Which line of the goals it belongs to, if any."""
    detail: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{key} {shown(value)}" for key, value in self.detail.items())
        return f"{self.name}: {shown(self.value)} {self.unit}" + (f" ({parts})" if parts else "")


def shown(value: object) -> str:
    """Four digits of a number, the rest as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def append(path: Path, figure: Figure) -> None:
    """Add a line."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(figure)) + "\n")


def read(path: Path) -> list[Figure]:
    """The last figure of each name, of whole lines: a writer may have been killed amid its last one."""
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    figures = (Figure(**json.loads(line)) for line in lines)
    return list({figure.name: figure for figure in figures}.values())
