"""How many threads a shard computes with on CPU, and which OpenMP runtime runs them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
INTEL_OPENMP = "libiomp5.so"


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Threads of one shard, and the environment that its OpenMP runtime reads at start."""

    threads: int
    environment: Mapping[str, str] = field(default_factory=dict)


def plan_threads(
    *,
    cores: int,
    shards: int,
    requested: int | None,
    intel_openmp: Path | None,
    environ: Mapping[str, str],
) -> ThreadPlan:
    """Share `cores` between the shards of this host and the router.

    The idle threads of libgomp, which PyTorch brings, spin at every barrier: next to a busy router a step of two
    threads on two cores then takes ten to twenty times as long. Intel's runtime with a block time of 1 ms sleeps
    soon enough, so with it the shards take all cores. Without it one core is left to the router, and the threads
    of a shard never outnumber the cores they have. A count the user asked for is kept, and so is every variable
    the user has set.
    """
    environment = {"THP_MEM_ALLOC_ENABLE": "1"}
    if intel_openmp is not None and "LD_PRELOAD" not in environ:
        environment |= {"LD_PRELOAD": str(intel_openmp), "KMP_BLOCKTIME": "1"}
        threads = requested or max(1, cores // shards)
    else:
        threads = requested or max(1, (cores - 1) // shards)
    environment["OMP_NUM_THREADS"] = str(threads)
    if requested is None and environ.get("OMP_NUM_THREADS", "").isdecimal():
        threads = max(1, int(environ["OMP_NUM_THREADS"]))
    kept = {name: value for name, value in environment.items() if name not in environ}
    if requested is not None:
        kept["OMP_NUM_THREADS"] = str(requested)
    return ThreadPlan(threads, kept)


def usable_cores(*, cgroup: Path = CGROUP) -> int:
    """Cores this process may run on, by affinity and by the container's quota, at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cores(cgroup)
    return cores if quota is None else min(cores, max(1, quota))


def _cgroup_cores(cgroup: Path) -> int | None:
    """Whole cores of the quota of version 2 or 1, whose words for none are `max` and -1."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / name).read_text() for name in files).split()
        except (OSError, ValueError):
            continue
        return int(quota) // int(period) if quota.isdecimal() else None
    return None


def find_intel_openmp() -> Path | None:
    """Intel's OpenMP runtime as PyPI's intel-openmp installs it; None elsewhere than on x86 Linux."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return None
    packages = [Path(entry).parents[1] for entry in sys.path if entry.endswith("site-packages")]
    places = [Path(sys.prefix) / "lib", *packages]
    return next(
        (place / INTEL_OPENMP for place in places if (place / INTEL_OPENMP).is_file()), None
    )
