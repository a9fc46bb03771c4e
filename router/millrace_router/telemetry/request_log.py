"""The file of `--log-requests`: a line of JSON for each request, from a thread, so that none waits for the disk."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from logging import LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from queue import Full, Queue
from threading import Thread

import structlog

from millrace_router.telemetry.instruments import Counter
from millrace_router.telemetry.logs import json_line

MODE = 0o600
NUM_FULL_FILES = 5
"""Full files that are kept; `PATH.1` is the newest."""
MAX_WAITING_LINES = 10_000
"""About 5 MB."""
CLOSE_SECONDS = 5.0
TARGET = "millrace_router.server.access_log"

log = structlog.get_logger(__name__)


class RequestFile(RotatingFileHandler):
    """Writes to whatever file is at its path: after a rename, the next line opens a new file.

    A line that cannot be written is lost, and the next one is tried again.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Open the file; it is rotated after `max_bytes`, or never for 0. Raises OSError."""
        self.num_lost = 0
        self._is_failing = False
        super().__init__(path, maxBytes=max_bytes, backupCount=NUM_FULL_FILES, encoding="utf-8")

    def emit(self, record: LogRecord) -> None:
        """Write a line; raises nothing."""
        num_lost, was_failing = self.num_lost, self._is_failing
        if was_failing:
            # The file may end in a part of the line that could not be written.
            record.msg = f"\n{record.msg}"
        try:
            self._close_if_moved()
        except OSError:
            self.handleError(record)
            return
        super().emit(record)
        self._is_failing = self.num_lost > num_lost
        if was_failing and not self._is_failing:
            log.info("the request log is written again", num_lost=self.num_lost)

    def handleError(self, record: LogRecord) -> None:  # noqa: ARG002, N802
        """Count the line as lost; `logging` calls this method in an except block."""
        self.num_lost += 1
        if not self._is_failing:
            self._is_failing = True
            log.error("the request log cannot be written", error=str(sys.exc_info()[1]))
        self._drop()

    def abandon(self) -> None:
        """Let the process end while another thread's write hangs, for whose lock `logging` would wait at exit."""
        self.createLock()
        self.stream = None

    def _close_if_moved(self) -> None:
        """Close the file if another one, or none, is at the path now; raises OSError."""
        if self.stream is None:
            return
        with suppress(FileNotFoundError):
            there = Path(self.baseFilename).stat()
            if os.path.samestat(there, os.fstat(self.stream.fileno())):
                return
        self._drop()

    def _drop(self) -> None:
        """Close the file and drop what is in its buffer; the next line opens it again."""
        with suppress(OSError):
            self.close()

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=_open_private)


class RequestLog:
    """Takes lines from the event loop; lines that cannot be written are counted and have no other effect."""

    def __init__(self, file: RequestFile, lost: Counter) -> None:
        """Start the thread; `lost` is updated with every line."""
        self._file = file
        self._lost = lost
        self._num_refused = 0
        self._waiting: Queue[bytes | None] = Queue(MAX_WAITING_LINES)
        self._thread = Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def write(self, fields: Mapping[str, object]) -> None:
        """Write one request's fields as a line of the JSON log."""
        line = json_line(
            {
                "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
                "level": "info",
                "event": "request",
                "target": TARGET,
                **fields,
            }
        )
        try:
            self._waiting.put_nowait(line)
        except Full:
            self._num_refused += 1
        self._lost.inc(self._num_refused + self._file.num_lost - self._lost.value)

    def close(self) -> None:
        """Write the lines that wait, as many as the disk takes in `CLOSE_SECONDS`."""
        with suppress(Full):
            self._waiting.put_nowait(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._file.abandon()

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            self._file.emit(makeLogRecord({"msg": line.decode()}))
        self._file.close()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, MODE)


INTERVAL_SECONDS = 60.0


class ProgressLog:
    """Logs every minute how far a request is, until it is closed.

    The lines have the request's id, since a timer keeps the context in which it was started.
    """

    def __init__(self, max_new_tokens: int, generated_tokens: Callable[[], int]) -> None:
        """`generated_tokens` counts the tokens so far; needs a running event loop."""
        self._max_new_tokens = max_new_tokens
        self._minutes = 0
        self._start(generated_tokens)

    def close(self) -> None:
        self._timer.cancel()

    def _start(self, generated_tokens: Callable[[], int]) -> None:
        # Only the timer has the function, which may refer to what keeps this log: a cancelled timer forgets it.
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(INTERVAL_SECONDS, self._write, generated_tokens)

    def _write(self, generated_tokens: Callable[[], int]) -> None:
        self._minutes += 1
        log.info(
            "request is running",
            minutes=self._minutes,
            generated_tokens=generated_tokens(),
            max_new_tokens=self._max_new_tokens,
        )
        self._start(generated_tokens)
