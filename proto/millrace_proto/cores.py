"""The processor, and the cores of it that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")


def cpu_fact(name: str, *, cpuinfo: Path = CPUINFO) -> str:
    """The field `name` of the first core in /proc/cpuinfo, such as `model name` or `flags`; empty without it."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def usable_cores(*, cgroup: Path = CGROUP) -> int:
    """Cores that this process may use, by affinity and by the container's quota, at least 1."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cgroup_cores(cgroup)
    return cores if quota is None else min(cores, max(1, quota))


def _cgroup_cores(cgroup: Path) -> int | None:
    """Whole cores of the quota of cgroup version 2 or 1; None for no quota, written `max` and -1."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / name).read_text() for name in files).split()
        except (OSError, ValueError):
            continue
        return int(quota) // int(period) if quota.isdecimal() else None
    return None
