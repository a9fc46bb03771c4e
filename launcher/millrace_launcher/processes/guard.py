"""Kills the launcher's children and removes their sockets if the launcher itself was killed.

The guard reads lines on stdin: `PID` for a started child, `gone PID` for one that has ended with its descendants, and
`done` at an orderly end. When stdin closes without `done`, the guard kills the remaining children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from millrace_launcher.host.leftovers import remove_dead_socket, remove_registration

TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.02
DONE = "done"
GONE = "gone "


def main() -> None:
    """Guard the sockets on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    left = left_over(sys.stdin)
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    waiting = [Path(name) for name in sys.argv[1:]]
    while waiting and time.monotonic() < deadline:
        waiting = [path for path in waiting if not remove_dead_socket(path)]
        if waiting:
            time.sleep(POLL_SECONDS)
    for pid in left:
        remove_registration(pid)


def left_over(lines: Iterable[str]) -> set[int]:
    """The process ids of remaining children."""
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
