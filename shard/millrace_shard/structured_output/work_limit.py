"""A limit on the work of another process, whatever else the machine does meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

STRETCH = 6.0
"""How many times longer it may take by the clock."""
_AFTER_NAME = b") "
_USER, _SYSTEM = 11, 12
"""Fields of /proc/PID/stat after the name: clock ticks spent in the program, and in the kernel for it."""


class WorkLimit:
    """So many seconds of CPU time of a process, or `STRETCH` times as many of the clock, from when this is made.

    A process that waits for a busy machine does not do too much. Where its CPU time is not told, the clock counts.
    """

    def __init__(
        self,
        seconds: float,
        used: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`used` tells the CPU time of the process so far, in seconds."""
        self._seconds = seconds
        self._used = used
        self._clock = clock
        self._began, self._used_before = clock(), used()
        self._last_used = self._used_before

    def seconds_left(self) -> float:
        """For so long it need not be looked at; not above 0 when it is over."""
        elapsed = self._clock() - self._began
        worked = self._worked()
        if worked is None:
            return self._seconds - elapsed
        return min(self._seconds - worked, STRETCH * self._seconds - elapsed)

    def is_spent(self) -> bool:
        """Whether so much was worked, or may have been where that is not told; the clock alone says no such thing."""
        worked = self._worked()
        if worked is None:
            return self._clock() - self._began >= self._seconds
        return worked >= self._seconds

    def _worked(self) -> float | None:
        """In seconds; as last told, of a process that has ended since."""
        used = self._used()
        if used is not None:
            self._last_used = used
        if self._last_used is None or self._used_before is None:
            return None
        return self._last_used - self._used_before


def cpu_seconds(pid: int) -> float | None:
    """CPU time of all threads of a process so far; None where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(_AFTER_NAME) + len(_AFTER_NAME) :].split()
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")
