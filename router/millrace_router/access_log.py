"""One log line per request: what was asked of which route, how it ended, and where its time went; never its text."""

from __future__ import annotations

import time
import uuid

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.generation import Collected, Generation
from millrace_router.headers import sum_of_times

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_LENGTH = 128
CLIENT_GONE = 499
"""nginx's number for a client that did not wait; only ever logged."""
PROBED_PATHS = frozenset({"/", "/health", "/ping", "/livez", "/readyz", "/metrics"})

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
_GENERATIONS: web.RequestKey[list[Generation | Collected]] = web.RequestKey("generations", list)

log = structlog.get_logger(__name__)


def watch(request: web.Request, *generations: Generation | Collected) -> None:
    """Have the request's line tell of these generations."""
    request[_GENERATIONS].extend(generations)


@web.middleware
async def access_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, and log it when it has ended, however it ended."""
    started_at = time.monotonic()
    request[REQUEST_ID] = _request_id(request.headers.get(REQUEST_ID_HEADER))
    request[_GENERATIONS] = []
    status = CLIENT_GONE
    with structlog.contextvars.bound_contextvars(request_id=request[REQUEST_ID]):
        try:
            response = await handler(request)
            status = response.status
        finally:
            _log(request, status, time.monotonic() - started_at)
    return response


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the client its request's name; a hook of `on_response_prepare`."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id


def _request_id(given: str | None) -> str:
    if given and len(given) <= MAX_REQUEST_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def _log(request: web.Request, status: int, seconds: float) -> None:
    probe = request.method == "GET" and request.path in PROBED_PATHS
    write = log.debug if probe and status < 400 else log.info
    write(
        "request",
        method=request.method,
        route=request.rel_url.raw_path[:200],
        status=status,
        total_time=round(seconds, 6),
        **_summary(request[_GENERATIONS]),
    )


def _summary(generations: list[Generation | Collected]) -> dict[str, float | int]:
    if not generations:
        return {}
    times = sum_of_times([one.times for one in generations])
    return {
        "prompt_tokens": sum(len(one.valid.input_ids) for one in generations),
        "generated_tokens": sum(one.generated_tokens for one in generations),
        "queue_time": round(times.queue, 6),
        "inference_time": round(times.inference, 6),
        "time_per_token": round(times.per_token / len(generations), 6),
    }
