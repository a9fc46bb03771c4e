"""Times of a step: by the host's clock, or on request by events in the stream of the device.

No wait spins: a CUDA event without the blocking flag occupies a core until the device reaches it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol, Self

import torch


class Event(Protocol):
    """A point in the work that is submitted to a device; `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Set the point after the work that is submitted so far."""

    def query(self) -> bool:
        """Whether the device has reached the point."""

    def synchronize(self) -> None:
        """Wait until the device reaches the point, without the interpreter lock."""

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds on the device from this event to another one; both must have been reached."""


class NewEvent(Protocol):
    """Creates events."""

    def __call__(self, *, enable_timing: bool) -> Event:
        """An event whose wait sleeps; it has a time only with `enable_timing`."""


def new_cuda_event(*, enable_timing: bool) -> Event:
    """An event whose wait sleeps until the device reports."""
    event: Event = torch.cuda.Event(  # type: ignore[no-untyped-call]
        enable_timing=enable_timing, blocking=True
    )
    return event


@dataclass(slots=True)
class DeviceProgress:
    """The progress of a device over several steps, as far as the host knows it."""

    done_ns: int = 0
    """By the host's clock, when the device was done with the last step that was waited for."""


@dataclass(frozen=True, slots=True)
class _Reached:
    """When a step began and when it reached its marks, by the host's clock."""

    began_ns: int
    marks_ns: list[int]


class Stopwatch:
    """The start of a step, and marks after the logits and after the sampled tokens.

    On CUDA with `by_device`, durations are those on the device. Otherwise a mark is reached when `wait` learns of it,
    and a step begins when it is launched, or when the device is done with the step before, whichever is later.
    """

    def __init__(
        self,
        device: torch.device,
        progress: DeviceProgress,
        *,
        by_device: bool = False,
        new_event: NewEvent = new_cuda_event,
    ) -> None:
        """All steps of a device share `progress`."""
        self._new_event = new_event if device.type == "cuda" else None
        self._by_device = by_device and self._new_event is not None
        self._progress = progress
        self._launched = time.perf_counter_ns()
        self._reached: _Reached | None = None
        self._events: list[Event] = []
        self.concat_ns: int | None = None
        if self._new_event is None:
            self._reached = _Reached(self._launched, [])
        elif self._by_device:
            self._record(self._new_event)

    def mark(self) -> None:
        """Mark the end of the work submitted so far."""
        if self._new_event is not None:
            self._record(self._new_event)
        elif self._reached is not None:
            self._reached.marks_ns.append(time.perf_counter_ns())

    def wait(self) -> None:
        """Wait until the work before the last mark is done, without the interpreter lock. Any thread may wait."""
        if self._by_device:
            self._events[-1].synchronize()
        elif self._reached is None:
            began = max(self._launched, self._progress.done_ns)
            marks = []
            for event in self._events:
                event.synchronize()
                marks.append(time.perf_counter_ns())
            self._reached = _Reached(began, marks)
            self._progress.done_ns = marks[-1]

    def is_done(self) -> bool:
        """Whether the work before the last mark is done."""
        return self._new_event is None or self._events[-1].query()

    def elapsed_ns(self, mark: int) -> int:
        """Nanoseconds from the start to mark `mark`, counted from 1; `wait` must have returned."""
        if self._by_device:
            return int(self._events[0].elapsed_time(self._events[mark]) * 1e6)
        assert self._reached is not None, "the step has not been waited for"
        # If a later step was waited for first, `began_ns` is past the marks.
        return max(0, self._reached.marks_ns[mark - 1] - self._reached.began_ns)

    def since_start_ns(self) -> int:
        """Nanoseconds from the launch until now, by the host's clock."""
        return time.perf_counter_ns() - self._launched

    def _record(self, new_event: NewEvent) -> None:
        event = new_event(enable_timing=self._by_device)
        event.record()
        self._events.append(event)
