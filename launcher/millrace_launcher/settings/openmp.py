"""What OpenMP's runtime leaves behind in shared memory when its process is killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def remove_registration(pid: int, folder: Path = SHARED_MEMORY) -> None:
    """Unlink the entries by which a process that has ended knew its copy of the runtime; one that exits does it itself.

    Intel's and LLVM's runtimes make `__KMP_REGISTERED_LIB_{pid}_{uid}`: 4 KiB for every shard that was ever killed.
    """
    for entry in folder.glob(f"__KMP_REGISTERED_LIB_{pid}_*"):
        with suppress(OSError):
            entry.unlink()
