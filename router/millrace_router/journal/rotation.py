"""The folder of journal files: one router writes to it, and the oldest files make room for new ones."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from millrace_router.journal.frames import JournalError, JournalUnusable

SUFFIX = ".journal"
MODE = 0o600
SHARE = 8
"""After this fraction of `max_bytes` the next epoch begins a new file …"""
EPOCH_SHARE = 2
"""… and after this one no more is recorded of an epoch."""
MAX_FILES = 256
"""The largest number of files."""


class JournalFolder:
    """A folder of journal files. The names sort in the order of creation."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Create the folder for this user only, and lock it; raises JournalError."""
        self._path = path
        self._max_bytes = max_bytes
        self._last_ns = 0
        self._current = ""
        """Name of the newest file."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise JournalError(f"cannot keep a journal in {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise JournalError(f"another router keeps its journal in {path}") from None

    @property
    def file_bytes(self) -> int:
        """The size after which the next epoch begins a new file."""
        return self._max_bytes // SHARE

    @property
    def most_file_bytes(self) -> int:
        """The largest size of a file."""
        return self._max_bytes // EPOCH_SHARE

    def begin(self) -> int:
        """Create a file for this user only, with room for `file_bytes`; returns a descriptor. Raises OSError."""
        self._current = ""
        self.make_room(self.file_bytes)
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        seconds, ns = divmod(self._last_ns, 1_000_000_000)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
        self._current = f"millrace-{stamp}.{ns:09d}Z{SUFFIX}"
        return os.open(self._current, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE, dir_fd=self._lock)

    def close(self) -> None:
        os.close(self._lock)

    def make_room(self, num_bytes: int) -> None:
        """Delete the oldest files, so that the newest one may have `num_bytes`; raises OSError."""
        files = [
            (path, path.stat().st_size)
            for path in journal_files(self._path)
            if path.name != self._current
        ]
        room = self._max_bytes - num_bytes - sum(size for _, size in files)
        surplus = len(files) - MAX_FILES + 1
        for path, size in files:
            if room >= 0 and surplus <= 0:
                return
            with suppress(FileNotFoundError):
                path.unlink()
            room += size
            surplus -= 1


def journal_files(path: Path) -> list[Path]:
    """Return the files of a folder in order, or the file at `path`; raises JournalUnusable if there is none."""
    if path.is_dir():
        return sorted(path.glob(f"*{SUFFIX}"))
    if not path.is_file():
        raise JournalUnusable(f"{path} does not exist")
    return [path]
