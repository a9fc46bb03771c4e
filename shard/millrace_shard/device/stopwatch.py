"""Times of a step on the device that computes it: CUDA events in its stream, or the host's clock."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """The start of a step, and marks after the logits and after the sampled tokens."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._started = time.perf_counter_ns()
        self._marks: list[int] = [self._started]
        self._events: list[torch.cuda.Event] = []
        self.concat_ns: int | None = None
        if self._is_cuda:
            self._record()

    def mark(self) -> None:
        """Mark the end of the work submitted so far."""
        self._marks.append(time.perf_counter_ns())
        if self._is_cuda:
            self._record()

    def wait(self) -> None:
        """Wait until the work before the last mark is done, without the interpreter lock."""
        if self._is_cuda:
            self._events[-1].synchronize()

    def is_done(self) -> bool:
        """Whether the work before the last mark is done."""
        if not self._is_cuda:
            return True
        is_done: bool = self._events[-1].query()  # type: ignore[no-untyped-call]
        return is_done

    def elapsed_ns(self, mark: int) -> int:
        """Nanoseconds from the start, on CUDA as the device reached it, to mark `mark`, counted from 1."""
        if self._is_cuda:
            return int(self._events[0].elapsed_time(self._events[mark]) * 1e6)
        return self._marks[mark] - self._started

    def since_start_ns(self) -> int:
        """Nanoseconds from the start until now, by the host's clock."""
        return time.perf_counter_ns() - self._started

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
