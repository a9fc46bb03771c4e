"""A few hundred mutated checkpoints, within limits of memory and time; `make test-all SUITE=fuzz` tries more."""

from __future__ import annotations

import os
import subprocess
import sys

NUM_MUTATIONS = 150
"""Of each kind."""


def test_mutated_checkpoints_are_refused_or_loaded() -> None:
    program = "millrace_testing.quantized.fuzz_checkpoints"
    done = subprocess.run(
        [sys.executable, "-m", program, str(NUM_MUTATIONS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    for kind in ("header", "config", "gguf"):
        assert f"'{kind} refused': " in done.stdout
        assert f"'{kind} loaded': " in done.stdout
