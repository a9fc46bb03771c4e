"""Runs some cases of the checks, for what Triton compiles: `some_cases.py SHAPE COUNT INDEX`."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import torch

from bench.gpu.checks.compilation import cases_of
from bench.gpu.engine.scale import SCALES
from bench.gpu.setting import Setting


def main() -> int:
    """Return 0 after the last case."""
    shape, count, index = sys.argv[1:]
    setting = Setting(torch.device("cuda"), SCALES[shape], Path(), math.inf)
    for case in cases_of(int(index), int(count), setting):
        case()
    return 0


if __name__ == "__main__":
    status = main()
    # The shutdown of torch takes seconds.
    os._exit(status)
