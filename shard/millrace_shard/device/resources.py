"""Bytes of memory of the machine and of this process."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")


def available_memory(*, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes of host memory that the kernel reports as available, or the rest of the container's limit if less."""
    available = _meminfo_available(meminfo)
    left = _cgroup_left(cgroup)
    return available if left is None else min(available, left)


def resident_memory() -> int:
    """Bytes of memory that this process has now; 0 where the system does not say."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_memory() -> int:
    """The most bytes of memory that this process has ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_cuda_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a GPU; memory that torch caches counts as used."""
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def _meminfo_available(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_left(cgroup: Path) -> int | None:
    """Bytes left below the limit of cgroup version 2 or 1; the page cache is reclaimable and does not count."""
    for limit_name, usage_name, cache_field in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (cgroup / limit_name).read_text().strip()
            usage = int((cgroup / usage_name).read_text())
            stat = (cgroup / limit_name).with_name("memory.stat").read_text()
        except OSError:
            continue
        if limit == "max":
            return None
        fields = dict(line.split() for line in stat.splitlines())
        return max(0, int(limit) - usage + int(fields.get(cache_field, 0)))
    return None
