"""A line of JSON for each request in a separate file, written by a thread, so that no request waits for the disk."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from logging import makeLogRecord
from queue import Full, Queue
from threading import Thread

from millrace_router.telemetry.instruments import Counter
from millrace_router.telemetry.logs import json_line
from millrace_router.telemetry.request_file import RequestFile

MAX_WAITING_LINES = 10_000
"""About 5 MB."""
CLOSE_SECONDS = 5.0
TARGET = "millrace_router.server.access_log"


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
