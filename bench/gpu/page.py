"""The results of a run, written again after every stage: gpu.json with everything, gpu.md with one page."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from bench.gpu import goals
from bench.gpu.children import Ended
from bench.gpu.figures import KERNEL, Figure, shown
from bench.gpu.goals import Line, checks, speeds
from bench.gpu.peaks import Peak, peak_of
from bench.gpu.plan import Stage
from bench.gpu.smi import Sample, throttled
from bench.harness.tables import markdown

GOALS_SHAPE = "8b"
CHECK_HEADINGS = ("check", "found", "made", "goal", "")
SPEED_HEADINGS = ("case", "measured", "reached", "goal", "")
STAGE_HEADINGS = ("stage", "question", "end", "time", "figures")
ACTIVITY_HEADINGS = ("decode", "idle", "launches", "copies", "waits", "sampling")
TRACE_HEADINGS = ("longest kernel", "runs", "ms", "of the device's work")
MOST_NAME = 80
"""Characters of a kernel's name: templates have thousands."""
RATE_HEADINGS = ("kernel", "time", "GB/s", "of the peak", "TFLOP/s", "of the peak")
KERNEL_HEADINGS = ("kernel", "variants", "registers", "bytes spilled", "bytes shared")
CLOCK_HEADINGS = ("stage", "samples", "SM, MHz", "memory, MHz", "hottest", "power", "throttled")
FACTS = (
    *("gpu", "compute capability", "memory", "driver", "CUDA of torch", "torch", "triton"),
    *("transformers", "vllm", "python", "commit", "persistence mode", "ECC", "PCIe", "links"),
    *("free for kernels", "notes"),
)
TAIL_LINES = 12
NO_GPU = """\
**No figure on this page is of a GPU.** torch finds no CUDA device here, so every stage ran on the CPU with a tiny
model, kernels in Triton's interpreter and servers on the kernels for CPUs. The page shows that the program runs.
Nothing has been measured on a GPU."""
NO_SPEEDS = "Speed is not measured without a GPU."


class Results:
    """The results of the stages so far."""

    def __init__(self, out: Path, *, device: str, shape: str) -> None:
        self.json_path = out / "gpu.json"
        self.page_path = out / "gpu.md"
        self._device = device
        self._shape = shape
        self._started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._stages: dict[Stage, Ended] = {}
        self._num_figures: dict[Stage, int] = {}
        self._figures: Sequence[Figure] = ()
        self._samples: dict[str, list[Sample]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether every stage so far succeeded and no check was missed; speeds are for the reader to judge."""
        ends = all(ended.status == "ok" for ended in self._stages.values())
        return ends and all(line.verdict != "missed" for line in checks(self._figures))

    def add(
        self, stage: Stage, ended: Ended, figures: Sequence[Figure], samples: Sequence[Sample] = ()
    ) -> None:
        """Add the end of `stage`, all figures so far and the samples during the stage, and write them.

        Figures that were measured while the GPU was throttled are marked.
        """
        self._stages[stage] = ended
        self._num_figures[stage] = len(figures) - len(self._figures)
        self._samples[stage.name] = samples_of(samples, _machine(figures).get("uuid"))
        self._figures = [marked(figure, chain(*self._samples.values())) for figure in figures]
        content = json.dumps(_finite(self._content()), indent=2, allow_nan=False)
        self.json_path.write_text(content + "\n")
        self.page_path.write_text(self.text())

    def text(self) -> str:
        """The page: facts, stages, checks, speeds, and the last lines of stages that failed."""
        parts = [
            f"# First hour on a device: {self._shape} on {self._device}, {self._started}",
            "" if self._device == "cuda" else NO_GPU,
            self._facts(),
            markdown(STAGE_HEADINGS, [self._row(stage) for stage in self._stages]),
            self._clocks(),
            markdown(CHECK_HEADINGS, [_cells(line) for line in checks(self._figures)]),
            self._speeds() if self._device == "cuda" else NO_SPEEDS,
            self._kernels(),
            self._trace(),
            *(
                "\n".join(
                    [f"The end of {stage.name}:", "", "```", *ended.tail[-TAIL_LINES:], "```"]
                )
                for stage, ended in self._stages.items()
                if ended.status in ("failed", "timed out", "unusable")
            ),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _row(self, stage: Stage) -> tuple[str, ...]:
        ended = self._stages[stage]
        figures = str(self._num_figures[stage])
        return stage.name, stage.question, ended.status, f"{ended.seconds:.0f} s", figures

    def _facts(self) -> str:
        machine = _machine(self._figures)
        return ", ".join(f"{name} {machine[name]}" for name in FACTS if name in machine)

    def _clocks(self) -> str:
        """The clocks of each stage that was sampled."""
        rows = [clocks_row(name, samples) for name, samples in self._samples.items() if samples]
        return markdown(CLOCK_HEADINGS, rows) if rows else ""

    def _speeds(self) -> str:
        figures, name = goals.Figures(self._figures), _machine(self._figures).get("gpu", "")
        peak = peak_of(name)
        limits = [
            f"{kind} {shown(limit.value)} {unit}{_of_peak(limit, peak)}{goals.throttle_mark(limit)}"
            for kind, unit in goals.UNIT.items()
            if (limit := figures.last(kind)) is not None
        ]
        starts = [
            f"{f.name} {shown(f.value)} {f.unit}{goals.throttle_mark(f)}"
            for f in figures.all(goals.READY)
        ]
        rates = [_rate(figure, peak) for figure in figures.all(goals.RATE)]
        activities = [_activity(figure) for figure in figures.all(goals.ACTIVITY)]
        parts = [
            f"Measured limits: {', '.join(limits)}." if limits else "",
            "" if peak else f"No data sheet of {name or 'this device'} is known here.",
            "" if self._shape == GOALS_SHAPE else f"The goals are for {GOALS_SHAPE}.",
            markdown(SPEED_HEADINGS, [_cells(line) for line in speeds(self._figures)]),
            f"Seconds from the start of a server: {', '.join(starts)}." if starts else "",
            markdown(ACTIVITY_HEADINGS, activities) if activities else "",
            markdown(RATE_HEADINGS, rates) if rates else "",
        ]
        return "\n\n".join(part for part in parts if part)

    def _kernels(self) -> str:
        """What each compiled kernel takes: of its variants, the one with the most shared memory."""
        rows = [
            (
                figure.name.removeprefix("kernel "),
                shown(int(figure.value)),
                *(shown(figure.detail[name]) for name in ("registers", "spilled", "shared")),
            )
            for figure in self._figures
            if figure.kind == KERNEL
        ]
        return markdown(KERNEL_HEADINGS, rows) if rows else ""

    def _trace(self) -> str:
        """The trace's file, and the kernels that took longest in it."""
        figure = goals.Figures(self._figures).last(goals.TRACE)
        if figure is None:
            return ""
        detail = figure.detail
        parts = [f"Trace of {detail['work']}: {detail['file']}, {figure.value / 1e6:.1f} MB."]
        rows = [
            (name[:MOST_NAME].replace("|", "/"), str(runs), f"{ms:.2f}", f"{share:.1%}")
            for name, runs, ms, share in detail["kernels"]
        ]
        if rows:
            parts.append(markdown(TRACE_HEADINGS, rows))
        return "\n\n".join(parts)

    def _content(self) -> dict[str, Any]:
        return {
            "started": self._started,
            "device": self._device,
            "is_of_a_gpu": self._device == "cuda",
            "shape": self._shape,
            "stages": {stage.name: asdict(ended) for stage, ended in self._stages.items()},
            "clocks": {
                name: dict(zip(CLOCK_HEADINGS[1:], clocks_row(name, samples)[1:], strict=True))
                for name, samples in self._samples.items()
                if samples
            },
            "figures": [asdict(figure) for figure in self._figures],
            "checks": [asdict(line) for line in checks(self._figures)],
            "speeds": [asdict(line) for line in speeds(self._figures)],
        }


def _machine(figures: Sequence[Figure]) -> dict[str, Any]:
    return next((figure.detail for figure in figures if figure.name == "machine"), {})


def samples_of(samples: Sequence[Sample], uuid: str | None) -> list[Sample]:
    """Those of the GPU `uuid`, or of the first one where none has it."""
    own = [sample for sample in samples if sample.uuid == uuid]
    return own or [sample for sample in samples if sample.uuid == samples[0].uuid]


def marked(figure: Figure, samples: Iterable[Sample]) -> Figure:
    """The figure, with a detail that says so if a sample during its measuring is throttled."""
    reasons = throttled(s for s in samples if figure.began <= s.moment <= figure.ended)
    if not reasons:
        return figure
    return replace(figure, detail={**figure.detail, goals.THROTTLED: reasons})


def clocks_row(stage: str, samples: Sequence[Sample]) -> tuple[str, ...]:
    """A stage's clocks from lowest to highest, its highest temperature and power, and what throttled it."""

    def range_of(values: Iterable[float | None], form: str = "{low:.0f} to {high:.0f}") -> str:
        known = [value for value in values if value is not None]
        return form.format(low=min(known), high=max(known)) if known else "not reported"

    return (
        stage,
        str(len(samples)),
        range_of(s.sm_mhz for s in samples),
        range_of(s.memory_mhz for s in samples),
        range_of((s.celsius for s in samples), "{high:.0f} °C"),
        range_of((s.watts for s in samples), "{high:.0f} W"),
        throttled(samples) or "no",
    )


def _rate(figure: Figure, peak: Peak | None) -> tuple[str, ...]:
    """A kernel's time, and its bytes and operations a second with their shares of the data sheet."""
    seconds, detail = figure.value / 1e6, figure.detail
    cells = [figure.name, f"{shown(figure.value)} {figure.unit}{goals.throttle_mark(figure)}"]
    for name, unit in (("bytes", 1e9), ("flops", 1e12)):
        rate = detail[name] / seconds
        most = None if peak is None else (peak.bandwidth if name == "bytes" else peak.rate)
        share = "unknown" if most is None else f"{rate / most:.0%}"
        cells += [f"{rate / unit:.0f}", share] if rate else ["", ""]
    return tuple(cells)


def _of_peak(limit: Figure, peak: Peak | None) -> str:
    """The share of the data sheet that a measured limit reaches."""
    if peak is None:
        return ""
    most = peak.rate if limit.kind == goals.MATRIX_RATE else peak.bandwidth
    return f", {limit.value * goals.PREFIX[limit.kind] / most:.0%} of the data sheet"


def _activity(figure: Figure) -> tuple[str, ...]:
    """A step's idle share of the device, and its launches, copies and waits."""
    detail = figure.detail
    counts = (shown(float(detail[name])) for name in ("launches", "copies", "waits"))
    return (
        figure.name.removeprefix("device idle, "),
        f"{figure.value:.1f}%",
        *counts,
        f"{detail['sampling_share']:.1%}",
    )


def _cells(line: Line) -> tuple[str, ...]:
    return line.case, line.measured, line.reached, line.goal, line.verdict


def _finite(value: object) -> object:
    """The same containers with null for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
