"""Outlives the launcher by a moment, so that even its `kill -9` leaves no child and no socket file.

Its stdin closes however the launcher ends. Until then it reads the children's process ids, a line each, and `done`
once they are known to be gone; without that word they are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from millrace_launcher.sockets import remove_dead_socket

PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.02
DONE = "done"


def main() -> None:
    """Guard the sockets named on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = sys.stdin.read().split()
    if DONE not in words:
        for pid in map(int, words):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_SECONDS
    waiting = [Path(name) for name in sys.argv[1:]]
    while waiting and time.monotonic() < deadline:
        waiting = [path for path in waiting if not remove_dead_socket(path)]
        if waiting:
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
