"""`python -m bench.comparison.roofline_probe read|multiply THREADS SECONDS`: rates and the CPU of others, as JSON.

`read` sums a gibibyte, in bytes a second; `multiply` is a square bfloat16 product, in operations.
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


def main() -> None:
    kind, threads, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(threads)
    if kind == "read":
        values = torch.ones(READ_VALUES)
        meter = CpuMeter(list)
        found = rates(values.sum, 4.0 * READ_VALUES, seconds)
    else:
        left = torch.randn(SIDE, SIDE).to(torch.bfloat16)
        right = torch.randn(SIDE, SIDE).to(torch.bfloat16)
        meter = CpuMeter(list)
        found = rates(lambda: left @ right, 2.0 * SIDE**3, seconds)
    print(json.dumps({"rates": found, "other_cores": meter.stop().other_cores}))


if __name__ == "__main__":
    main()
