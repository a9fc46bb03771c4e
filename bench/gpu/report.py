"""The results of a run, written again after every stage: gpu.json with everything, gpu.txt with the table."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.gpu.children import Ended
from bench.gpu.figures import Figure
from bench.gpu.goals import Line, table
from bench.gpu.scale import GRAPH_SIZES
from bench.harness.tables import markdown

GOALS_SHAPE = "8b"
HEADINGS = ("case", "measured", "reached", "goal", "")
STAGE_HEADINGS = ("stage", "end", "time")


class Run:
    """The results of the stages so far."""

    def __init__(self, out: Path, *, device: str, shape: str) -> None:
        self.path = out / "gpu.json"
        self._text_path = out / "gpu.txt"
        self._device = device
        self._shape = shape
        self._started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._stages: dict[str, Ended] = {}
        self._figures: Sequence[Figure] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every stage so far succeeded."""
        return all(ended.status == "ok" for ended in self._stages.values())

    def add(self, stage: str, ended: Ended, figures: Sequence[Figure]) -> None:
        """Add the end of `stage` and all figures so far, and write them."""
        self._stages[stage] = ended
        self._figures = figures
        self.path.write_text(json.dumps(self._content(), indent=2) + "\n")
        self._text_path.write_text(self.text())

    def text(self) -> str:
        """Goals, figures, and the end of each stage, with the last lines of failed ones."""
        parts = [
            f"{self._shape} on {self._device}, {self._started}",
            f"CUDA graphs for batches of {', '.join(map(str, GRAPH_SIZES))}; the launcher's own end at 32.",
            "" if self._shape == GOALS_SHAPE else f"The goals are those of {GOALS_SHAPE}.",
            markdown(HEADINGS, [_cells(line) for line in table(self._figures)]),
            "\n".join(figure.text() for figure in self._figures),
            markdown(
                STAGE_HEADINGS,
                [(n, e.status, f"{e.seconds:.0f} s") for n, e in self._stages.items()],
            ),
        ]
        for name, ended in self._stages.items():
            if ended.status in ("failed", "timed out"):
                parts.append("\n".join([f"the end of {name}:", *ended.tail[-30:]]))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _content(self) -> dict[str, object]:
        return {
            "started": self._started,
            "device": self._device,
            "shape": self._shape,
            "stages": {name: asdict(ended) for name, ended in self._stages.items()},
            "figures": [asdict(figure) for figure in self._figures],
            "table": [asdict(line) for line in table(self._figures)],
        }


def _cells(line: Line) -> tuple[str, ...]:
    return line.case, line.measured, line.reached, line.goal, line.verdict
