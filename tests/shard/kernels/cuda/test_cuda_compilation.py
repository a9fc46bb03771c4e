"""Every kernel compiles to machine code for two generations of GPUs, of which none need be here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

ROOT = Path(__file__).parents[4]
PROGRAM = ROOT / "tests/support/millrace_testing/engines/compile_kernels.py"


def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in compiled} >= {"attend_tiles", "attend_spans", "fold_spans"}
    too_large = [each for each in compiled if int(each[2]) > int(each[3])]
    assert not too_large
