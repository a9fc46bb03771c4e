"""Runs a batch: a bounded number of requests in flight, each answer written as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from millrace.batch.lines import BadLine, BatchRequest, answer_line, read_lines
from millrace.batch.output import Output
from millrace.http.client import Client

BUSY = (429, 503)
"""Statuses after which a request is sent again."""
PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
MOST_TRIES = 12


@dataclass(slots=True)
class Counts:
    """Counts of the lines that are answered, failed and skipped."""

    skipped: int = 0
    """Lines that an earlier run has answered."""
    answered: int = 0
    failed: int = 0
    """Bad lines, and answers with another status than 200; a later run asks again where the server was too busy."""

    @property
    def done(self) -> int:
        """All of them."""
        return self.skipped + self.answered + self.failed


async def run_batch(
    client: Client,
    source: Path,
    output: Output,
    counts: Counts,
    *,
    concurrency: int,
    on_line: Callable[[], None] = lambda: None,
    pause_seconds: float = PAUSE_SECONDS,
) -> None:
    """Answer every line of `source` that has no answer yet; `on_line` is called after each.

    Raises OSError, or ConnectionFailed where the server is gone; what was written stays, and a later run goes on.
    """
    lines = _left(source, output, counts)

    async def work() -> None:
        for line in lines:
            if isinstance(line, BadLine):
                output.write(line.answer())
                counts.failed += 1
            else:
                status, body = await _ask(client, line, pause_seconds)
                if status not in BUSY:
                    output.write(answer_line(line, status, _json(body)))
                if status == 200:
                    counts.answered += 1
                else:
                    counts.failed += 1
            on_line()

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _left(source: Path, output: Output, counts: Counts) -> Iterator[BatchRequest | BadLine]:
    """The lines without an answer."""
    for line in read_lines(source):
        done = (
            line.line in output.bad_lines
            if isinstance(line, BadLine)
            else line.custom_id in output.custom_ids
        )
        if done:
            counts.skipped += 1
        else:
            yield line


async def _ask(client: Client, request: BatchRequest, pause: float) -> tuple[int, bytes]:
    """The server's answer; a busy server is asked again after a pause, which doubles."""
    status, body = await client.ask("POST", request.url, request.body)
    for _ in range(MOST_TRIES - 1):
        if status not in BUSY:
            break
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        status, body = await client.ask("POST", request.url, request.body)
    return status, body


def _json(body: bytes) -> object:
    """The body as JSON, or as text where it is none."""
    try:
        return orjson.loads(body)
    except ValueError:
        return body.decode(errors="replace")
