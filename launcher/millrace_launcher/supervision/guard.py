"""Outlives the launcher by a moment, so that even its `kill -9` leaves no child and no socket file.

Its stdin closes however the launcher ends. Until then it reads lines: `PID` of a child that has been started, `gone
PID` of one that has ended with all it started, and `done` once that is true of all. Without that word it kills those
that are left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from millrace_launcher.settings.openmp import remove_registration
from millrace_launcher.settings.sockets import remove_dead_socket

PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.02
DONE = "done"
GONE = "gone "


def main() -> None:
    """Guard the sockets named on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    left = left_over(sys.stdin)
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_SECONDS
    waiting = [Path(name) for name in sys.argv[1:]]
    while waiting and time.monotonic() < deadline:
        waiting = [path for path in waiting if not remove_dead_socket(path)]
        if waiting:
            time.sleep(POLL_SECONDS)
    for pid in left:
        remove_registration(pid)


def left_over(lines: Iterable[str]) -> set[int]:
    """Children that the launcher left behind."""
    left: set[int] = set()
    for line in map(str.strip, lines):
        if line == DONE:
            return set()
        if line.startswith(GONE):
            left.discard(int(line.removeprefix(GONE)))
        elif line.isdecimal():
            left.add(int(line))
    return left


if __name__ == "__main__":
    main()
