"""The number of a shard's CPU threads, and its OpenMP runtime."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

INTEL_OPENMP = "libiomp5.so"


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Threads of one shard, and variables of its OpenMP runtime."""

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
    """Divide `cores` among the shards of this host and the router.

    The idle threads of libgomp, which PyTorch includes, spin at every barrier, so a step of two threads on two cores
    takes ten to twenty times as long next to a busy router. With Intel's runtime and a block time of 1 ms idle threads
    sleep, so the shards get all cores. Without it the router keeps one core. A requested number of threads and the
    user's variables are kept.
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


def find_intel_openmp() -> Path | None:
    """The library of PyPI's intel-openmp; None except on x86 Linux."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return None
    packages = [Path(entry).parents[1] for entry in sys.path if entry.endswith("site-packages")]
    places = [Path(sys.prefix) / "lib", *packages]
    return next(
        (place / INTEL_OPENMP for place in places if (place / INTEL_OPENMP).is_file()), None
    )
