"""The table on the terminal: a line for each level, and a line that moves for the one that runs."""

from __future__ import annotations

import asyncio
import time
from typing import TextIO

from millrace.load.load import RequestOutcome
from millrace.load.measurement import Measurement, Quantiles

EVERY_SECONDS = 0.5
START_OF_LINE = "\r\x1b[K"
COLUMNS = ("level", "done", "failed", "req/s", "tok/s", "first ms", "between ms", "total ms")
WIDTHS = (10, 9, 7, 8, 9, 20, 20, 23)


def row(cells: tuple[str, ...]) -> str:
    """A line of the table."""
    return " ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def header() -> str:
    """The line above all others."""
    return row(COLUMNS) + "\n" + row(("", "", "", "", "", *(("p50/p90/p99",) * 3)))


def line_of(measurement: Measurement) -> str:
    """The figures of a level that has ended."""
    requests_per_second = measurement.num_requests / max(measurement.wall_seconds, 1e-9)
    return row(
        (
            measurement.level,
            str(measurement.num_requests),
            str(len(measurement.failures)),
            f"{requests_per_second:.2f}",
            f"{measurement.tokens_per_second:.1f}",
            _three(measurement.first_token_ms),
            _three(measurement.between_tokens_ms),
            _three(measurement.total_ms),
        )
    )


def _three(quantiles: Quantiles) -> str:
    return "/".join(
        f"{value:.{int(value < 10)}f}" for value in (quantiles.p50, quantiles.p90, quantiles.p99)
    )


def moving_line(name: str, num_requests: int, outcome: RequestOutcome, seconds: float) -> str:
    """The figures so far of the level that runs."""
    num_tokens = sum(len(timeline.arrivals) for timeline in outcome.started)
    done = len(outcome.timelines) + len(outcome.failures)
    first = Quantiles.of(t.first_token_seconds for t in outcome.started if t.arrivals)
    return row(
        (
            name,
            f"{done}/{num_requests}",
            str(len(outcome.failures)),
            f"{len(outcome.timelines) / max(seconds, 1e-9):.2f}",
            f"{num_tokens / max(seconds, 1e-9):.1f}",
            _three(first),
            *("", ""),
        )
    )


class LiveLine:
    """Rewrites the last line of a terminal while a level runs; writes nothing to another stream."""

    def __init__(
        self, stream: TextIO, name: str, num_requests: int, outcome: RequestOutcome
    ) -> None:
        self._stream = stream
        self._name = name
        self._num_requests = num_requests
        self._outcome = outcome
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._stream.isatty():
            self._task = asyncio.create_task(self._draw())

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            self._stream.write(START_OF_LINE)
            self._stream.flush()

    async def _draw(self) -> None:
        start = time.monotonic()
        while True:
            seconds = time.monotonic() - start
            text = moving_line(self._name, self._num_requests, self._outcome, seconds)
            self._stream.write(START_OF_LINE + text)
            self._stream.flush()
            await asyncio.sleep(EVERY_SECONDS)
