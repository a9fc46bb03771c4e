"""Routes of other servers are refused with what there is instead."""

from __future__ import annotations

import orjson
import pytest

from millrace_router.api.body.foreign_routes import TIPS, foreign_route
from millrace_router.api.openapi.document import OPERATIONS
from millrace_testing.router.edge import serving


@pytest.mark.parametrize(
    ("path", "tip"),
    [
        ("/api/tags", "/v1/models lists"),
        ("/api/chat", "/v1/chat/completions"),
        ("/completion", "/generate"),
        ("/v1/files/file-1/content", "run-batch"),
        ("/chat/completions", "base URL"),
        ("/v1/chat/completions/chat/completions", "base URL"),
    ],
)
async def test_a_route_of_another_server_has_a_tip(path: str, tip: str) -> None:
    async with serving() as edge:
        status, answer, _ = await edge.post(path, {})
        assert (await edge.get(path))[:2] == (404, orjson.dumps(answer))
    assert (status, answer["error_type"]) == (404, "not_found")
    message = answer["error"]["message"] if path.startswith("/v1") else answer["error"]
    assert message.startswith(f"Unknown path: {path}. This is Millrace")
    assert tip in message


async def test_strict_tgi_has_no_tips() -> None:
    async with serving(strict_tgi=True) as edge:
        status, answer, _ = await edge.get("/api/tags")
    assert (status, answer) == (404, b"")


@pytest.mark.parametrize("path", ["/", "", "/foo", "/apiary", "/v1", "/v1/models/api/tags"])
def test_other_paths_have_none(path: str) -> None:
    assert foreign_route(path) is None


def test_no_route_of_ours_is_foreign() -> None:
    assert not TIPS.keys() & {operation.path for operation in OPERATIONS}
