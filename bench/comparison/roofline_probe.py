"""`python -m bench.comparison.roofline_probe read|multiply THREADS SECONDS`: rates and the CPU of others, as JSON.

`read` sums a gibibyte, in bytes a second; `multiply` is a square product, in operations a second: in bfloat16, or in
float32 where only those are fast.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from bench.harness.machine import CpuMeter

READ_VALUES = 2**28
SIDE = 4096


def rates(call: Callable[[], object], amount: float, seconds: float) -> list[float]:
    """The rate of each call within the time, at least three after a warm-up."""
    call()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        found.append(amount / (time.perf_counter() - start))
    return found


def multiplied_type() -> torch.dtype:
    """Return bfloat16, or float32 if it is three times as fast: held to AVX2, torch only emulates bfloat16."""

    def rate(dtype: torch.dtype) -> float:
        x = torch.ones(256, 256, dtype=dtype)
        return max(rates(lambda: x @ x, 1.0, 0.0))

    is_emulated = rate(torch.float32) > 3 * rate(torch.bfloat16)
    return torch.float32 if is_emulated else torch.bfloat16


def main() -> None:
    kind, threads, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(threads)
    if kind == "read":
        values = torch.ones(READ_VALUES)
        meter = CpuMeter(list)
        found = rates(values.sum, 4.0 * READ_VALUES, seconds)
    else:
        dtype = multiplied_type()
        left = torch.randn(SIDE, SIDE).to(dtype)
        right = torch.randn(SIDE, SIDE).to(dtype)
        meter = CpuMeter(list)
        found = rates(lambda: left @ right, 2.0 * SIDE**3, seconds)
    print(json.dumps({"rates": found, "other_cores": meter.stop().other_cores}))


if __name__ == "__main__":
    main()
