"""Waits for the log of a download to tell that it is on its way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Halfway(logging.Handler):
    """Waits for a record that tells progress of more than a third."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Look at the share in one record."""
        if getattr(record, "fields", {}).get("fraction", 0) > 0.33:
            self.seen.set()


@contextmanager
def halfway() -> Iterator[threading.Event]:
    """An event that is set once the log of this process tells progress of more than a third."""
    handler = Halfway()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.seen
    finally:
        logging.getLogger().removeHandler(handler)
