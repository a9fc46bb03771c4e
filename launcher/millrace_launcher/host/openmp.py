"""Removes files of OpenMP runtimes of killed processes from shared memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def remove_registration(pid: int, folder: Path = SHARED_MEMORY) -> None:
    """Remove the files with which the OpenMP runtime of an ended process was registered.

    Intel's and LLVM's runtimes make `__KMP_REGISTERED_LIB_{pid}_{uid}` of 4 KiB, and remove it unless they are killed.
    """
    for entry in folder.glob(f"__KMP_REGISTERED_LIB_{pid}_*"):
        with suppress(OSError):
            entry.unlink()
