"""Calls of the operating system for this process."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent process ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library can: loading a large vocabulary frees as much as it keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def bind(hostname: str, port: int) -> socket.socket:
    """Bind the address without listening, so that connections are refused until the server is ready.

    Raises:
        OSError: the address is in use, or belongs to another host.

    """
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((hostname, port))
    except OSError:
        reserved.close()
        raise
    return reserved
