"""Reads the small files of a model, which come from its authors: only regular files, of a bounded size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MIB = 1 << 20
MAX_SMALL_FILE_BYTES = 64 * MIB
MAX_TOKENIZER_BYTES = 512 * MIB


def read_small_file(path: Path, *, max_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes:
    """Read a regular file.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it cannot be opened, is a pipe or a device, or has more than `max_bytes`.

    """
    # Without O_NONBLOCK a pipe would block until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"it has more than {max_bytes // MIB} MiB")
    return data
