"""Ends the process when its parent ends, since a shard needs its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT = os.getppid()
"""The parent process id at the start."""


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies; end at once if the parent is dead. Linux only.

    A forked process passes the id of its `parent`.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != (PARENT if parent is None else parent):
        sys.exit(1)
