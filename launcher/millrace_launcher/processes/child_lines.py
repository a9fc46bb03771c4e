"""Passes a child's lines on to the log, except the error that it ends with."""

from __future__ import annotations

import asyncio

from millrace_launcher.logs import error_message, relay

HOLD_SECONDS = 1.0
"""Time for a child to end after an error; a longer one is logged before it is known whether the child ends."""


class ChildLines:
    """Logs a child's lines. An error waits for the next line: as the last one, it is the cause of the child's end."""

    def __init__(self, source: str) -> None:
        self.cause: str | None = None
        """The message of the last line, if that is an error."""
        self._source = source
        self._held: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: str) -> None:
        """Log a line, now or with the next one; needs a running event loop."""
        self.release()
        self.cause = error_message(line)
        if self.cause is None:
            relay(line, source=self._source)
            return
        self._held = line
        self._timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self.release)

    def release(self) -> None:
        """Log an error that waits."""
        self.drop()
        if self._held is not None:
            held, self._held = self._held, None
            relay(held, source=self._source)

    def drop(self) -> None:
        """Let an error wait for good: its message is told in another way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
