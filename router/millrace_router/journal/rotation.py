"""Where journal files lie: one router writes to a folder, and the oldest files make room for new ones."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from millrace_router.journal.errors import JournalError, JournalUnusable

SUFFIX = ".journal"
MODE = 0o600
SHARE = 8
"""Files together hold `max_bytes`; each is about this part of it."""
MOST_FILES = 256
"""However small they are."""


class JournalFolder:
    """A folder of journal files, by name in the order in which they were begun."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Create it, for this user alone, and lock it; raises JournalError."""
        self._path = path
        self._max_bytes = max_bytes
        self._last_ns = 0
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
        """After so many bytes a file is full."""
        return self._max_bytes // SHARE

    def begin(self) -> int:
        """A descriptor of a new file that only this user can read, once there is room for it; raises OSError."""
        self._make_room()
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        seconds, ns = divmod(self._last_ns, 1_000_000_000)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
        name = f"millrace-{stamp}.{ns:09d}Z{SUFFIX}"
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE, dir_fd=self._lock)

    def close(self) -> None:
        """Let another router have it."""
        os.close(self._lock)

    def _make_room(self) -> None:
        files = [(path, path.stat().st_size) for path in journal_files(self._path)]
        room = self._max_bytes - self.file_bytes - sum(size for _, size in files)
        surplus = len(files) - MOST_FILES + 1
        for path, size in files:
            if room >= 0 and surplus <= 0:
                return
            with suppress(FileNotFoundError):
                path.unlink()
            room += size
            surplus -= 1


def journal_files(path: Path) -> list[Path]:
    """The files of a folder in order, or the one file that `path` is; raises JournalUnusable if there is none."""
    if path.is_dir():
        return sorted(path.glob(f"*{SUFFIX}"))
    if not path.is_file():
        raise JournalUnusable(f"{path} is not there")
    return [path]
