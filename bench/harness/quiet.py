"""Waits until no other process uses the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.harness.machine import CpuMeter
from bench.harness.repeats import BUSY_CORES


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """The idle time that is required, and the longest wait for it."""

    idle_seconds: float = 2.0
    patience_seconds: float = 120.0


def others_now(seconds: float) -> float:
    """Cores that unrelated processes used over the next `seconds`."""
    meter = CpuMeter(list)
    time.sleep(seconds)
    return meter.stop().other_cores


def wait_until_quiet(
    quiet: Quiet,
    *,
    measure: Callable[[float], float] = others_now,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until other processes use less than `BUSY_CORES` for the idle time; False when the wait ran out.

    A figure taken after False is marked as disturbed through the load recorded with it.
    """
    deadline = clock() + quiet.patience_seconds
    while True:
        if measure(quiet.idle_seconds) < BUSY_CORES:
            return True
        if clock() >= deadline:
            return False
