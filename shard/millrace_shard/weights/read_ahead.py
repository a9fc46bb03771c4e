"""Prefetches files into the page cache before their mapping is read, and logs the progress of loading."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread

from millrace_shard.device.resources import available_memory

INTERVAL_SECONDS = 5.0

logger = logging.getLogger(__name__)


class LoadProgress:
    """Counts the bytes of a checkpoint that have been read, and logs them every INTERVAL_SECONDS."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._clock = clock
        self._logged_at = clock()

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        now = self._clock()
        if now - self._logged_at >= INTERVAL_SECONDS:
            self._logged_at = now
            logger.info(
                "loaded %s of %s", readable_size(self._num_bytes), readable_size(self._total_bytes)
            )


def readable_size(num_bytes: int) -> str:
    """A size in GB, or in MB below 1 GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


CHUNK = 8 << 20
"""Bytes per request to the system."""
MEMORY_SHARE = 0.25
"""Share of the available memory to prefetch: pages that are read too early would be dropped again."""


class ReadAhead:
    """Prefetches `paths` in order, at most `max_bytes` ahead of the bytes reported to `used`.

    A mapping is read 128 KiB at a time, on demand, and the disk is idle in between: prefetched, uncached files are read
    1.6 to 2.6 times as fast. A file that cannot be prefetched is read on demand.
    """

    def __init__(self, paths: Sequence[Path], *, max_bytes: int | None = None) -> None:
        self._allowed = int(available_memory() * MEMORY_SHARE) if max_bytes is None else max_bytes
        self._is_closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._prefetch, args=(paths,), name="read-ahead", daemon=True)
        self._thread.start()

    def used(self, num_bytes: int) -> None:
        """Report `num_bytes` more bytes as read, so that as many may be prefetched."""
        with self._changed:
            self._allowed += num_bytes
            self._changed.notify()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _prefetch(self, paths: Sequence[Path]) -> None:
        prefetched = 0
        # Some file systems do not support this, and macOS lacks the call.
        with suppress(OSError, AttributeError):
            for path in paths:
                with path.open("rb") as file:
                    for offset in range(0, os.fstat(file.fileno()).st_size, CHUNK):
                        if not self._wait_for_room(prefetched):
                            return
                        os.posix_fadvise(file.fileno(), offset, CHUNK, os.POSIX_FADV_WILLNEED)
                        prefetched += CHUNK

    def _wait_for_room(self, prefetched: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or prefetched < self._allowed)
            return not self._is_closed
