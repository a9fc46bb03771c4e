"""Memory, file descriptors and threads of processes over time, and the slope of memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

import psutil

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Reading:
    """One process at one moment."""

    at: float
    """Seconds after the start."""
    role: str
    pid: int
    resident: int
    """Bytes."""
    num_fds: int
    num_threads: int


def read(processes: Mapping[str, psutil.Process], *, start: float) -> list[Reading]:
    """A reading of each process that lives, with its role; `start` is a time of `time.perf_counter`."""
    found = []
    for role, process in processes.items():
        try:
            resident = process.memory_info().rss
            num_fds, num_threads = process.num_fds(), process.num_threads()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        at = time.perf_counter() - start
        found.append(Reading(at, role, process.pid, resident, num_fds, num_threads))
    return found


def lives(readings: Iterable[Reading]) -> list[list[Reading]]:
    """The readings of each process, in order of time."""
    ordered = sorted(readings, key=lambda reading: (reading.pid, reading.at))
    return [list(group) for _, group in groupby(ordered, key=lambda reading: reading.pid)]


def megabytes_per_hour(readings: Sequence[Reading], *, after: float, settle: float) -> float | None:
    """The least-squares slope of resident memory, common to all lives of a role, each around its own mean.

    Readings before `after` and in the first `settle` seconds of each life do not count. None if no life has two
    other readings.
    """
    products = squares = 0.0
    for life in lives(readings):
        kept = [one for one in life if one.at >= max(after, life[0].at + settle)]
        if len(kept) < 2:
            continue
        mean_at, mean_size = fmean(o.at for o in kept), fmean(o.resident for o in kept)
        products += sum((o.at - mean_at) * (o.resident - mean_size) for o in kept)
        squares += sum((o.at - mean_at) ** 2 for o in kept)
    return products / squares * 3600 / MEGABYTE if squares else None
