"""A shard without its launcher is of no use: it ends when its parent does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT = os.getppid()
"""Who started this process, noted as soon as it runs."""


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies; end it if that has happened already. Linux only.

    A process that was forked names its `parent`.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != (PARENT if parent is None else parent):
        sys.exit(1)
