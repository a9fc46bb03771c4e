"""Ends the process: when its parent ends, since a shard needs its launcher, and in time whatever it computes.

It also measures the parts of a start.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn, Self

PR_SET_PDEATHSIG = 1
SIGEV_THREAD = 2
CLOCK_MONOTONIC = 1
PARENT = os.getppid()
"""The parent process id at the start."""
START_AGAIN = 75
"""Exit code of a rank whose group has to meet anew: EX_TEMPFAIL."""


class Stages:
    """The parts of a start, in seconds since the process began, and in seconds of CPU time of all its threads."""

    def __init__(self) -> None:
        self._parts = list[str]()
        self._since = (0.0, 0.0)

    def done(self, name: str) -> Self:
        """The part `name` ends now; it began with the end of the last one."""
        now = (_age(), time.process_time())
        seconds, busy = (after - before for after, before in zip(now, self._since, strict=True))
        self._parts.append(f"{name} {seconds:.2f} ({busy:.2f})")
        self._since = now
        return self

    def __str__(self) -> str:
        """All of them, for the log."""
        return "{:.2f} s ({:.2f} s of CPU time): ".format(*self._since) + ", ".join(self._parts)


def _age() -> float:
    """Seconds since the process began; its CPU time where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError):
        return time.process_time()


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies; end at once if the parent is dead. Linux only.

    A forked process passes the id of its `parent`.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != (PARENT if parent is None else parent):
        sys.exit(1)


class _Event(ctypes.Structure):
    """`struct sigevent`: at its time, a thread runs `function` with `value`."""

    _fields_ = (
        ("value", ctypes.c_size_t),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`: seconds and nanoseconds of a period and of the first time."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("period", "period_ns", "seconds", "nanoseconds")
    )


def end_in(seconds: float, status: int) -> None:
    """Exit with `status` in `seconds` without Python code, since a computation may hold the interpreter lock.

    Linux only. Raises OSError if the system has no timer left.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    end = ctypes.cast(libc._exit, ctypes.c_void_p)  # noqa: SLF001
    event = _Event(value=status, notify=SIGEV_THREAD, function=end.value)
    timer = ctypes.c_void_p()
    if libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0:
        raise OSError(ctypes.get_errno(), "timer_create failed")
    whole = int(seconds)
    times = _Times(seconds=whole, nanoseconds=int((seconds - whole) * 1e9))
    if libc.timer_settime(timer, 0, ctypes.byref(times), None) != 0:
        raise OSError(ctypes.get_errno(), "timer_settime failed")


def end_process(status: int) -> NoReturn:
    """Exit at once: torch's teardown takes seconds, and a normal exit would wait for blocked threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
