"""Runs the program on its command line, with the kernel's order to kill it when the launcher dies.

It is a program rather than a hook between fork and exec, where Python code is not safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Usage: child PARENT_PID PROGRAM ARGUMENT…; the parent must be this process's parent."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(sys.argv[1]):
        # The launcher died before the call of prctl.
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606


if __name__ == "__main__":
    main()
