"""The lines of a batch: requests as OpenAI's Batch API has them, and answers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

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
    """A line that is no request."""

    line: int
    custom_id: str | None
    code: str
    reason: str

    def answer(self) -> dict[str, Any]:
        """Its line of the output."""
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


def count_lines(path: Path) -> int:
    """Lines that are not empty. Raises OSError."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def read_lines(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Every line that is not empty, in order; the second line of a custom_id is bad. Raises OSError."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            found = parse(number, line)
            if isinstance(found, BatchRequest):
                if found.custom_id in seen:
                    reason = "there is an earlier line with this custom_id"
                    found = BadLine(number, found.custom_id, "duplicate_custom_id", reason)
                else:
                    seen.add(found.custom_id)
            yield found


def parse(number: int, line: bytes) -> BatchRequest | BadLine:
    """One line of the input."""
    try:
        value = orjson.loads(line)
    except ValueError as error:
        return BadLine(number, None, "invalid_json_line", f"it is not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(number, None, "invalid_json_line", "it is no object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str):
        return BadLine(number, None, "missing_required_parameter", "custom_id is no text")
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
        return "body is no object"
    if body.get("stream"):
        return "a batch has no streams"
    return None
