"""`millrace run-batch IN OUT`: answers a file of requests, and continues where an earlier run ended."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from millrace.batch import Counts, Output, count_lines, run_batch
from millrace.commands.parser import Parser, positive, split
from millrace.errors import MillraceError, OutputError
from millrace.http.client import Client, is_url
from millrace.server import serving
from millrace_launcher.config import DEMO_NAME
from millrace_launcher.logs import START_OF_LINE, bar

PROGRAM = "millrace run-batch"
BAR_SECONDS = 0.2


class Progress:
    """A bar on a terminal, and one line at the end."""

    def __init__(self, counts: Counts, total: int) -> None:
        self._counts = counts
        self._total = total
        self._started = time.monotonic()
        self._drawn = 0.0

    def update(self) -> None:
        """Draw the bar, at most a few times a second."""
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._drawn >= BAR_SECONDS:
            self._drawn = now
            text = f"{self._counts.done} of {self._total}, {self._counts.failed} failed"
            fraction = self._counts.done / max(1, self._total)
            sys.stderr.write(START_OF_LINE + bar(fraction, text))
            sys.stderr.flush()

    def end(self) -> None:
        """Write what became of all lines."""
        counts = self._counts
        start = START_OF_LINE if sys.stderr.isatty() else ""
        sys.stderr.write(
            f"{start}{counts.answered} answered, {counts.failed} failed, {counts.skipped} answered before"
            f" of {self._total} in {time.monotonic() - self._started:.1f} s\n"
        )


def main(argv: Sequence[str]) -> int:
    """Run the batch: 0 when every line has its answer, 1 when one failed, the server is gone or the disk is full."""
    words, flags = split(argv)
    parser = _parser()
    given = parser.parse_args(words)
    if given.url is not None and flags:
        parser.error("flags after -- are for a server of this command's own, not for a URL")
    if given.url is None and given.model is None:
        parser.error(
            "no server: name a running one by --url http://127.0.0.1:3000, or the model to start one for by --model;"
            f" --model {DEMO_NAME} is the demo model"
        )
    if given.url is not None and not is_url(given.url):
        parser.error(f"{given.url} must be an http:// or https:// address")
    try:
        total = count_lines(given.source)
        output = Output(given.output)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except OutputError as error:
        parser.error(str(error))
    try:
        with output, ExitStack() as stack:
            url = given.url
            if url is None:
                url = stack.enter_context(serving(given.model, flags, program=PROGRAM))
            return asyncio.run(_run(given, url, output, total))
    except (MillraceError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


async def _run(given: argparse.Namespace, url: str, output: Output, total: int) -> int:
    counts = Counts()
    progress = Progress(counts, total)
    try:
        async with Client(url, given.api_key) as client:
            await run_batch(
                client,
                given.source,
                output,
                counts,
                concurrency=given.concurrency,
                on_line=progress.update,
            )
    finally:
        progress.end()
    return 1 if counts.failed else 0


def _parser() -> Parser:
    parser = Parser(
        PROGRAM,
        usage="IN OUT (--url URL | --model MODEL) [FLAG ...] [-- LAUNCHER_FLAG ...]",
        description="Answers the requests of a file in the format of OpenAI's Batch API. Lines whose custom_id is in\n"
        "OUT already are left out, so that the same command goes on after an end.",
    )
    add = parser.add_argument
    add(
        "source",
        type=Path,
        metavar="IN",
        help="requests: custom_id, method, url and body, one a line",
    )
    add(
        "output",
        type=Path,
        metavar="OUT",
        help="answers, one a line, in the order in which they come",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", metavar="URL", help="a running server of OpenAI's API")
    where.add_argument(
        "--model", metavar="MODEL", help=f"serve this model; {DEMO_NAME} is the demo model"
    )
    add(
        "--concurrency",
        type=positive,
        default=64,
        metavar="N",
        help="requests in flight [default: 64]",
    )
    parser.add_api_key()
    return parser
