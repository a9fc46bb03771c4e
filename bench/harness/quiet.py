"""Waiting until nobody else uses the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.harness.machine import CpuMeter
from bench.harness.repeats import BUSY_CORES


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """How long the machine has to be idle, and how long to hope for that."""

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
    """Return once others used less than `BUSY_CORES` for the idle time; False when patience ended first.

    What is measured after False is marked as disturbed, by the load recorded with it.
    """
    deadline = clock() + quiet.patience_seconds
    while True:
        if measure(quiet.idle_seconds) < BUSY_CORES:
            return True
        if clock() >= deadline:
            return False
