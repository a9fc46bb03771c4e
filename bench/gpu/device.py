"""The device of this machine, asked of torch in a child process, since the caller may lack torch.

This module imports the standard library alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Device = Literal["cuda", "cpu"]

PROBE = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
PROBE_SECONDS = 60.0


def find_device(environment: Mapping[str, str], cwd: Path) -> Device:
    """Return "cuda" if torch finds a GPU, else "cpu", also where torch is missing or does not answer in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "cpu"
    return "cuda" if done.returncode == 0 else "cpu"
