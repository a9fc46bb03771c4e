"""Becomes the program named on the command line, after asking the kernel to kill it when the launcher dies.

A process of its own rather than a hook between fork and exec, where no Python may safely run beside threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Usage: child PARENT_PID PROGRAM ARGUMENT…; the parent must be the process that started this one."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(sys.argv[1]):
        # The launcher died before the kernel was asked.
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606


if __name__ == "__main__":
    main()
