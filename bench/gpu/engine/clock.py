"""Time on the device: CUDA events in its stream, or this process's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

WARM_UP_SECONDS = 0.5


class Clock:
    """Time marks between pieces of work that are submitted in order."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def mark(self) -> None:
        """Mark the end of the work submitted so far."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._seconds.append(time.perf_counter())

    def gaps_ms(self) -> list[float]:
        """Seconds from each mark to the next; waits for the last one."""
        if not self._is_cuda:
            return [1000 * (after - before) for before, after in pairwise(self._seconds)]
        self._events[-1].synchronize()
        return [float(before.elapsed_time(after)) for before, after in pairwise(self._events)]


def median_ms(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median of `repeats` runs, after a warm-up that raises the device's clock rate."""
    began = time.perf_counter()
    while True:
        work()
        if device.type != "cuda":
            break
        torch.cuda.synchronize(device)
        if time.perf_counter() - began > WARM_UP_SECONDS:
            break
    clock = Clock(device)
    clock.mark()
    for _ in range(repeats):
        work()
        clock.mark()
    return statistics.median(clock.gaps_ms())
