"""The errors of adapters as clients of each dialect see them."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_router.errors import (
    AdapterForbidden,
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    AdapterUnavailable,
    RouterError,
)
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import serving

CASES: list[tuple[RouterError, int, str, str | None, str]] = [
    (AdapterNotFound("a"), 404, "adapter_not_found", "model_not_found", "not_found_error"),
    (AdapterForbidden("a"), 403, "adapter_forbidden", None, "permission_error"),
    (AdapterInvalid("a", "no"), 422, "validation", None, "invalid_request_error"),
    (AdapterTooLarge("a", num_bytes=9, limit=8), 413, "validation", None, "request_too_large"),
    (
        AdapterUnavailable("a", "no", retry_after_seconds=6.5),
        503,
        "unavailable",
        None,
        "overloaded_error",
    ),
]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("error", "status", "error_type", "code", "anthropic"), CASES, ids=lambda case: str(case)[:20]
)
async def test_each_dialect_says_the_error(
    error: RouterError, status: int, error_type: str, code: str | None, anthropic: str
) -> None:
    def fail(_: ValidRequest, stream: TokenStream) -> None:
        stream.fail(error)

    async with serving(fail, template="a") as edge:
        given, answer, response = await edge.post("/generate", {"inputs": "a"})
        assert (given, answer) == (status, {"error": str(error), "error_type": error_type})
        assert response.headers.get("retry-after") == ("7" if status == 503 else None)
        given, answer, response = await edge.post("/v1/chat/completions", CHAT)
        assert (given, answer["error_type"]) == (status, error_type)
        assert (answer["error"]["message"], answer["error"]["code"]) == (str(error), code)
        assert ("retry-after" in response.headers) == (status == 503)
        given, answer, response = await edge.post("/v1/messages", CHAT)
        assert given == (400 if status == 422 else status)
        assert answer["error"] == {"type": anthropic, "message": str(error)}
        assert ("retry-after" in response.headers) == (status == 503)


def test_names_in_messages_are_short_and_on_one_line() -> None:
    for error in (AdapterNotFound("a\nb\x1b[0m\x00\u2028" + "x" * 5000), AdapterInvalid("\r", "z")):
        assert str(error).isprintable()
        assert len(str(error)) < 300
