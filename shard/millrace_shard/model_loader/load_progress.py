"""Progress of loading, logged at intervals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

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
        """Count `num_bytes` more bytes."""
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
