"""The device's work in a step of decodes, by torch's profiler: idle share, launches, copies, sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Event:
    """A call on the host or work on the device, in microseconds."""

    name: str
    on_device: bool
    start: float
    end: float


def measure_activity(session: Session, rows: int, *, num_steps: int) -> Figure | None:
    """The idle share of the device over decodes of the first `rows` sequences; None if no device works."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
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
