"""The command of a process that ends with its actor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def bound(command: Sequence[str]) -> list[str]:
    """Return `command` with a wrapper that ends it with this process: Ray kills its workers, and not their children."""
    return [sys.executable, "-m", "millrace_launcher.processes.child", str(os.getpid()), *command]
