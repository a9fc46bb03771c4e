"""What every part of a run shares, and what it hands back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import CpuMeter
from bench.quiet import Quiet
from bench.repeats import BUSY_CORES
from bench.serve import RunningServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """The model, and how much of everything."""

    model: Path
    quiet: Quiet
    out: Path
    scale: float = 1.0
    """Of the numbers of streams, kills and minutes."""
    minutes: float = 60.0
    """Of the soak."""
    seed: str = "survival"
    flags: Sequence[str] = ()
    """More of them, for every launcher."""

    def scaled(self, count: int, *, least: int = 1) -> int:
        """So many, or as many as a scaled run has."""
        return max(least, round(count * self.scale))

    def log(self, name: str) -> Path:
        """Where a launcher's log goes."""
        return self.out / f"survival-{re.sub('[^a-z0-9]+', '-', name)}.log"

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Leave figures as JSON; a reader never sees half of them."""
        path = self.out / f"survival-{name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=2) + "\n")
        partial.replace(path)


@dataclass(slots=True)
class Report:
    """What a part found out."""

    paragraphs: list[str] = field(default_factory=list)
    """Markdown."""
    problems: list[str] = field(default_factory=list)
    """What must not be; empty where the part has shown what it was to show."""
    data: dict[str, Any] = field(default_factory=dict)
    other_cores: float = 0.0
    """The most that others used of the machine's cores."""

    @property
    def text(self) -> str:
        """All of it, as a section's body."""
        notes = [f"{len(self.problems)} PROBLEMS: " + "; ".join(self.problems[:5])] * bool(
            self.problems
        )
        if self.other_cores > BUSY_CORES:
            notes.append(f"Disturbed: others used {self.other_cores:.1f} cores meanwhile.")
        return "\n\n".join((*self.paragraphs, *notes))

    def watch(self, server: RunningServer) -> Callable[[], None]:
        """Look at who else uses the machine, until the function returned is called."""
        meter = CpuMeter(server.processes)

        def stop() -> None:
            self.other_cores = max(self.other_cores, meter.stop().other_cores)

        return stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one claim is shown by."""

    name: str
    title: str
    run: Callable[[Lab], Report]
    """Raises ServerError, NoShard or aiohttp.ClientError where it cannot be shown either way."""
