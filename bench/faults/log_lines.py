"""The launcher's log in JSON, which holds its children's records too."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import orjson


@dataclass(frozen=True, slots=True)
class Line:
    """One record."""

    at: float
    """Unix seconds, by the clock of the process that wrote it."""
    target: str
    """The module that logged it."""
    message: str


def parse_lines(text: str) -> list[Line]:
    """Every record; other lines, such as an incomplete last one, are left out."""
    found = []
    for line in text.splitlines():
        try:
            record = orjson.loads(line)
            at = datetime.fromisoformat(record["timestamp"]).timestamp()
            found.append(Line(at, record["target"], record["fields"]["message"]))
        except (ValueError, TypeError, KeyError):
            continue
    return found
