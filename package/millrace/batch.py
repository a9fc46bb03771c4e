"""A file of requests: its lines, the file of answers, and the run that connects them."""

from __future__ import annotations

import asyncio
import codecs
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from millrace.errors import OutputError
from millrace.http.client import Client

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One good line of the input."""

    line: int
    """Its number, from 1."""
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a request."""

    line: int
    custom_id: str | None
    code: str
    reason: str

    def answer(self) -> dict[str, Any]:
        message = f"line {self.line}: {self.reason}"
        error = {"code": self.code, "message": message, "line": self.line}
        return {
            "id": _new_id(),
            "custom_id": self.custom_id,
            "response": None,
            "error": error,
        }


def answer_line(request: BatchRequest, status: int, body: object) -> dict[str, Any]:
    """The line of the output for an answer of the server, of whatever status."""
    return {
        "id": _new_id(),
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": _new_id(), "body": body},
        "error": None,
    }


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


BOM = codecs.BOM_UTF8
"""Some programs put it before the first line."""


def count_lines(path: Path) -> int:
    """Lines that are not empty. Raises OSError."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.removeprefix(BOM).strip())


def read_lines(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Every line that is not empty, in order; the second line of a custom_id is bad. Raises OSError."""
    seen: set[str] = set()
    with path.open("rb") as file:
        file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            entry = parse(number, line)
            if isinstance(entry, BatchRequest):
                if entry.custom_id in seen:
                    reason = "there is an earlier line with this custom_id"
                    entry = BadLine(number, entry.custom_id, "duplicate_custom_id", reason)
                else:
                    seen.add(entry.custom_id)
            yield entry


def parse(number: int, line: bytes) -> BatchRequest | BadLine:
    try:
        value = orjson.loads(line)
    except ValueError as error:
        return BadLine(number, None, "invalid_json_line", f"it is not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(number, None, "invalid_json_line", "it must be an object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str):
        return BadLine(number, None, "missing_required_parameter", "custom_id must be a string")
    reason = _reason(value)
    if reason is not None:
        return BadLine(number, custom_id, "invalid_request", reason)
    return BatchRequest(number, custom_id, value["url"], value["body"])


def _reason(value: Mapping[str, Any]) -> str | None:
    """Return the error of a request; None if the request is valid."""
    if value.get("method", "POST") != "POST":
        return "method is not POST"
    if value.get("url") not in ROUTES:
        return f"url is none of {', '.join(ROUTES)}"
    body = value.get("body")
    if not isinstance(body, dict):
        return "body must be an object"
    if body.get("stream"):
        return "a batch cannot stream"
    try:
        orjson.dumps(body)
    except TypeError:
        return "body is nested too deeply"
    return None


BEGINNING = b'{"id":"batch_req_'
"""Of every line."""


class Output:
    """Appends whole lines. An unfinished last line of an earlier run is cut, and its request asked again."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises OSError, and OutputError for a file of something else, which stays as it is."""
        self._file = path.open("a+b")
        self._file.seek(0)
        self.custom_ids: set[str] = set()
        """The `custom_id`s of the answered requests."""
        self.bad_lines: set[int] = set()
        """Numbers of input lines that have their error."""
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                if not BEGINNING.startswith(line[: len(BEGINNING)]):
                    raise _no_answers(path)
                break
            end += len(line)
            if not self._remember(line):
                raise _no_answers(path)
        self._file.truncate(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, answer: Mapping[str, Any]) -> None:
        """Append one line, which is with the system when this returns. Raises OSError."""
        self._file.write(orjson.dumps(answer) + b"\n")
        self._file.flush()

    def _remember(self, line: bytes) -> bool:
        """Whether the line is one of answers or errors."""
        try:
            value = orjson.loads(line)
        except ValueError:
            return False
        if not (isinstance(value, dict) and {"custom_id", "response", "error"} <= value.keys()):
            return False
        error = value["error"]
        if isinstance(error, dict) and isinstance(error.get("line"), int):
            self.bad_lines.add(error["line"])
        elif isinstance(value["custom_id"], str):
            self.custom_ids.add(value["custom_id"])
        return True


def _no_answers(path: Path) -> OutputError:
    return OutputError(f"{path} has a line that is no answer of a batch: name another file")


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
    """The body as JSON, or as text where it is none, or has more levels than a line can have."""
    try:
        value = orjson.loads(body)
        orjson.dumps({"response": {"body": value}})
    except (ValueError, TypeError):
        return body.decode(errors="replace")
    return value
