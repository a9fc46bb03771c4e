"""Progress of a download, logged at intervals from the size of what is on disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

REPORT_SECONDS = 5.0
MIB = 1024 * 1024

log = logging.getLogger(__name__)


def progress_line(there: int, total: int, *, new: int, seconds: float) -> str:
    """A log line: `there` of `total` bytes, and the time left at the rate of `new` bytes in `seconds`."""
    left = f"{(total - there) * seconds / new:.0f} s left" if new > 0 else "waiting for data"
    return f"downloaded {there / MIB:.0f} of {total / MIB:.0f} MiB, {left}"


def folder_bytes(folder: Path, pattern: str) -> int:
    """Bytes of the files that match, unfinished ones included."""
    total = 0
    for path in folder.glob(pattern):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            # The file was renamed after it was listed.
            continue
    return total


class DownloadProgress:
    """A context manager around a download that logs bytes and seconds left every `interval` seconds.

    `measure` tells the bytes on disk. The records have the field `fraction`, from which the launcher draws a bar.
    """

    def __init__(self, total: int, measure: Callable[[], int], *, interval: float) -> None:
        self._total = total
        self._measure = measure
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._report, name="download-progress", daemon=True)

    def __enter__(self) -> None:
        self._started = time.monotonic()
        self._first_bytes = self._measure()
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _report(self) -> None:
        while not self._done.wait(self._interval):
            there = min(self._measure(), self._total)
            seconds = time.monotonic() - self._started
            log.info(
                "%s",
                progress_line(there, self._total, new=there - self._first_bytes, seconds=seconds),
                extra={"fields": {"fraction": round(there / max(1, self._total), 4)}},
            )
