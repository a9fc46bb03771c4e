"""Time on the device, by CUDA events in its stream or this process's clock, and the limits measured with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

REPEATS = 40
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


def read_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes a second of a sum over one large buffer."""
    values = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / median_ms(values.sum, device, repeats=REPEATS) * 1e3


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written a second, of one half of a large buffer to the other."""
    source = torch.ones(num_bytes // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    moved = 2 * 4 * source.numel()
    return moved / median_ms(lambda: target.copy_(source), device, repeats=REPEATS) * 1e3


def matrix_rate(device: torch.device, size: int) -> float:
    """Operations a second of a product of random square matrices."""
    left, right = torch.randn(2, size, size, dtype=torch.float32, device=device).to(torch.bfloat16)
    out = torch.empty_like(left)
    milliseconds = median_ms(lambda: torch.mm(left, right, out=out), device, repeats=REPEATS)
    return 2 * size**3 / milliseconds * 1e3
