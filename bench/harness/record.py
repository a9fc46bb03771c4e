"""The result of one run: a heading for the terminal, and a JSON file under bench/results for `--record`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness import machine
from bench.harness.paths import RESULTS_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run of one benchmark."""

    bench: str
    """The benchmark: `scheduling` for `python -m bench.scheduling`."""
    title: str
    command: str
    figures: Any
    """Plain containers."""
    other_cores: float | None = None
    """The most CPU, in cores, that other processes used meanwhile; None where each sample has its own."""
    finished_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    machine: Mapping[str, str] = field(default_factory=machine.describe)

    def text(self, body: str) -> str:
        """Markdown: a heading that says what, when, where and how, and `body` below it."""
        facts = self.machine
        return (
            f"## {self.title} ({self.finished_at:%Y-%m-%d %H:%M})\n\n"
            f"`{self.command}` at commit {facts['commit']}, on {facts['cpu']} ({facts['cores']}), {facts['memory']},"
            f" torch {facts['torch']}, transformers {facts['transformers']}, Python {facts['python']}.\n\n{body}\n"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "bench": self.bench,
            "title": self.title,
            "date": self.finished_at.isoformat(timespec="minutes"),
            "commit": self.machine["commit"],
            "command": self.command,
            "machine": {k: v for k, v in self.machine.items() if k != "commit"},
            "other_cores": self.other_cores,
            "figures": self.figures,
        }

    def write(self, folder: Path = RESULTS_FOLDER) -> Path:
        """Write the JSON to a file whose name says when and what, and return its path."""
        name = re.sub("[^a-z0-9]+", "-", f"{self.bench} {self.title}".lower()).strip("-")
        return self.save(folder / f"{self.finished_at:%Y-%m-%d-%H%M}-{name}.json")

    def save(self, path: Path) -> Path:
        """Write the JSON to `path`, and return it; a reader never sees half of a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(formatted(self.as_json()) + "\n")
        return partial.replace(path)


SHORT = 100
"""Characters of a dictionary of numbers that takes one line."""


def _fits(value: Mapping[str, object]) -> bool:
    is_flat = not any(isinstance(each, (dict, list, str)) for each in value.values())
    return is_flat and len(json.dumps(value)) <= SHORT


def formatted(value: object, *, indent: str = "") -> str:
    """JSON in which rows, lists without lists or dictionaries, take one line each, and short figures as well."""
    deeper = indent + " "
    if isinstance(value, dict) and not _fits(value):
        lines = [
            f"{json.dumps(key)}: {formatted(each, indent=deeper)}" for key, each in value.items()
        ]
        begin, end = "{}"
    elif isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        lines = [formatted(each, indent=deeper) for each in value]
        begin, end = "[]"
    else:
        return json.dumps(value, ensure_ascii=False)
    return f"{begin}\n{deeper}" + f",\n{deeper}".join(lines) + f"\n{indent}{end}"
