"""Standard output for logs, which no reader can make a process wait for: lines that are not read are dropped."""

from __future__ import annotations

import atexit
import io
import os
import select
import stat
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_WAITING_LINES = 10_000
"""About 2 MB."""
CLOSE_SECONDS = 1.0
"""Time for the reader to take the lines that wait when the process ends."""


class LogOutput(io.RawIOBase):
    """Writes each line at once while the reader keeps up, so that the last words of a crash are not lost.

    Otherwise a thread writes, and lines beyond `MAX_WAITING_LINES` are dropped and counted.
    """

    def __init__(self, fd: int, report: Callable[[int], None]) -> None:
        """`report` logs a number of dropped lines, once the reader reads again."""
        super().__init__()
        self._fd = fd
        self._report = report
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lock = Lock()
        self._waiting: deque[bytes] = deque()
        self._thread: Thread | None = None
        self._num_dropped = 0
        atexit.register(self._finish)

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Take a line; returns its length at once, and raises nothing."""
        line = bytes(data)
        with self._lock:
            rest = line if self._thread is not None else self._write_now(line)
            if rest and len(self._waiting) >= MAX_WAITING_LINES:
                self._num_dropped += 1
            elif rest:
                self._waiting.append(rest)
                if self._thread is None:
                    self._thread = Thread(target=self._drain, name="log", daemon=True)
                    self._thread.start()
        return len(line)

    def _write_now(self, line: bytes) -> bytes:
        """Write what the reader has room for; return the rest."""
        while line and self._poll.poll(0):
            try:
                # A pipe that is ready has room for this much.
                line = line[os.write(self._fd, line[: select.PIPE_BUF]) :]
            except BlockingIOError:
                break
            except OSError:
                self._num_dropped += 1
                return b""
        return line

    def _drain(self) -> None:
        """Write the lines that wait, at the pace of the reader."""
        while True:
            with self._lock:
                line = self._waiting.popleft() if self._waiting else b""
                num_dropped = 0
                if not line:
                    self._thread = None
                    num_dropped, self._num_dropped = self._num_dropped, 0
            if not line:
                break
            while line:
                self._poll.poll()
                line = self._write_now(line)
        if num_dropped:
            self._report(num_dropped)

    def _finish(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)


def log_output(stream: TextIO, report: Callable[[int], None]) -> LogOutput | None:
    """Return the output for the descriptor of `stream`; None if it has none, or is a file, which no reader empties."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    stream.flush()
    return LogOutput(fd, report)


def log_text(stream: TextIO, report: Callable[[int], None]) -> TextIO:
    """Return a text stream over the output for `stream`, or `stream` itself if it has none."""
    output = log_output(stream, report)
    if output is None:
        return stream
    return io.TextIOWrapper(
        cast("BinaryIO", output),
        encoding=stream.encoding,
        errors="backslashreplace",
        write_through=True,
    )
