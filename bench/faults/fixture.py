"""The state that all parts of a run share, and the report of a part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.machine import CpuMeter
from bench.harness.quiet import Quiet
from bench.harness.repeats import BUSY_CORES
from bench.harness.server import RunningServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixture:
    """The model, and the scale of the run."""

    model: Path
    quiet: Quiet
    out: Path
    scale: float = 1.0
    """Factor on the numbers of streams, kills and minutes."""
    minutes: float = 60.0
    """Length of the soak."""
    seed: str = "faults"
    flags: Sequence[str] = ()
    """More flags for every launcher."""

    def scaled(self, count: int, *, least: int = 1) -> int:
        """`count` times the scale."""
        return max(least, round(count * self.scale))

    def log(self, name: str) -> Path:
        """The path of a launcher's log."""
        return self.out / f"faults-{re.sub('[^a-z0-9]+', '-', name)}.log"

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write figures as JSON; a reader never sees half of a file."""
        path = self.out / f"faults-{name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=2) + "\n")
        partial.replace(path)


@dataclass(slots=True)
class Report:
    """The findings of a part."""

    paragraphs: list[str] = field(default_factory=list)
    """Markdown."""
    problems: list[str] = field(default_factory=list)
    """Violations of what the part claims; empty when the claim holds."""
    data: dict[str, Any] = field(default_factory=dict)
    other_cores: float = 0.0
    """The most CPU, in cores, that other processes used."""

    @property
    def text(self) -> str:
        """All of it, as Markdown."""
        notes = [f"{len(self.problems)} PROBLEMS: " + "; ".join(self.problems[:5])] * bool(
            self.problems
        )
        if self.other_cores > BUSY_CORES:
            notes.append(f"Disturbed: other processes used {self.other_cores:.1f} cores meanwhile.")
        return "\n\n".join((*self.paragraphs, *notes))

    def watch(self, server: RunningServer) -> Callable[[], None]:
        """Measure the CPU of other processes until the returned function is called."""
        meter = CpuMeter(server.processes)

        def stop() -> None:
            self.other_cores = max(self.other_cores, meter.stop().other_cores)

        return stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One claim, and the run that shows it."""

    name: str
    title: str
    run: Callable[[Fixture], Report]
    """Raises ServerError, NoShard or aiohttp.ClientError where the part cannot run."""
