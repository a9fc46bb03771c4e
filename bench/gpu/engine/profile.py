"""The device's work by torch's profiler: idle share, launches, copies, sampling; and a trace of some steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu import goals
from bench.gpu.engine.session import Session
from bench.gpu.figures import Figure

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""Beginnings of the names of calls that launch kernels or graphs."""
COPY = "Memcpy"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


LONGEST = 10
TRACED_STEPS = (4, 1)
"""Decodes of a trace, and of the next one where it is too large."""
MOST_BYTES = 16 << 20
"""Of a compressed trace."""


@dataclass(frozen=True, slots=True)
class Event:
    """A call on the host or work on the device, in microseconds."""

    name: str
    on_device: bool
    start: float
    end: float


def measure_activity(session: Session, rows: int, *, num_steps: int) -> Figure | None:
    """The idle share of the device over decodes of the first `rows` sequences; None if no device works."""
    with profile(activities=_activities()) as profiler:
        times = session.decode(rows, num_steps)
    activity = activity_of(_events(profiler.events()), num_steps)
    if activity is None:
        return None
    sampling, forward = sum(times.sampling), sum(times.forward)
    return Figure(
        name=f"device idle, batch {rows}",
        kind=goals.ACTIVITY,
        value=100 * activity.pop("idle"),
        unit="%",
        detail={**activity, "sampling_share": sampling / max(1e-9, sampling + forward)},
    )


def write_trace(session: Session, path: Path, rows: int, length: int) -> Figure:
    """Write a trace of one prompt of `length` and decodes of the first `rows` sequences to `path`, for Chrome.

    `path` ends in .json.gz. The figure has its size in bytes, and the device's longest kernels. A trace of more than
    MOST_BYTES is taken again with fewer decodes, and in the end not kept.
    """
    events: Sequence[Event] = ()
    size = 0
    for num_steps in TRACED_STEPS:
        with profile(activities=_activities()) as profiler:
            session.admit(1, length, room=num_steps)
            session.decode(rows, num_steps)
        events = _events(profiler.events())
        profiler.export_chrome_trace(str(path))
        size = path.stat().st_size
        if size <= MOST_BYTES:
            break
        path.unlink()
    name = path.name if path.exists() else "not kept, too large"
    work = f"a prompt of {length} and {num_steps} decodes of {rows}"
    detail = {"file": name, "work": work, "kernels": longest(events)}
    return Figure(name="trace", kind=goals.TRACE, value=float(size), unit="bytes", detail=detail)


def longest(events: Iterable[Event]) -> list[tuple[str, int, float, float]]:
    """The LONGEST kernels by their time in all: name, number of runs, milliseconds, share of the device's work."""
    times: dict[str, list[float]] = {}
    for event in events:
        if event.on_device:
            times.setdefault(event.name, []).append((event.end - event.start) / 1e3)
    whole = sum(map(sum, times.values()))
    rows = [(name, len(each), sum(each), sum(each) / whole) for name, each in times.items()]
    return sorted(rows, key=lambda row: -row[2])[:LONGEST]


def activity_of(events: Sequence[Event], num_steps: int) -> dict[str, float] | None:
    """The idle share from the first work to the last, and launches, copies and waits a step; None without work."""
    work = sorted((e.start, e.end) for e in events if e.on_device)
    if not work:
        return None
    busy, reached = 0.0, work[0][0]
    for start, end in work:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    calls = [event.name for event in events if not event.on_device]
    copies = sum(event.on_device and event.name.startswith(COPY) for event in events)
    return {
        "idle": 1 - busy / max(1e-9, reached - work[0][0]),
        "launches": sum(name.startswith(LAUNCHES) for name in calls) / num_steps,
        "copies": copies / num_steps,
        "waits": sum(name.startswith(WAITS) for name in calls) / num_steps,
    }


def _activities() -> list[ProfilerActivity]:
    device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *device]


def _events(found: Iterable[Any]) -> list[Event]:
    return [
        Event(
            event.name,
            event.device_type.name == "CUDA",
            event.time_range.start,
            event.time_range.end,
        )
        for event in found
    ]
