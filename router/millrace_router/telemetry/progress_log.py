"""A log line for each minute that a request runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

INTERVAL_SECONDS = 60.0

log = structlog.get_logger(__name__)


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
