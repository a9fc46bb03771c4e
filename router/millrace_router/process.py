"""Calls of the operating system for this process."""

from __future__ import annotations

import ctypes
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
NAME = b"millrace-router"
"""The name of a router that serves, in `ps` and `top`. The kernel cuts names after 15 bytes."""
OTHER_FILES = 256
"""Open files that the server itself may need: shards, adapters, logs, and connections that are just being closed."""
MAX_FILES = 1 << 16
MAX_OPEN = 8192
"""Most connections, wherever more files may be open: each idle one takes some 20 kB."""


def die_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent process ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def show_name() -> None:
    """Name the process as a router that serves, which a waiting one is not; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, NAME, 0, 0, 0)


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library can: loading a large vocabulary frees as much as it keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def raise_file_limit() -> None:
    """Raise the limit of open files, each connection being one, as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Return how many connections may be open under the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, MAX_FILES)
    return min(MAX_OPEN, max(files - OTHER_FILES, files // 2))
