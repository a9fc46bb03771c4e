"""Wrappers of handlers that apply the dialect; in this server's own dialect they change nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.api.openai.errors import openai_errors, stream_error
from millrace_router.errors import (
    BatchSizeExceeded,
    BodyError,
    NotResumable,
    RouterError,
    SuffixNotSupported,
    TemplateError,
    ToolError,
)
from millrace_router.server.bodies import ERROR_TYPE, read_json
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.services import SERVICES, Services
from millrace_router.server.sse import DONE, STREAM_HEADERS, event

BEFORE_STREAMS = (
    BodyError,
    TemplateError,
    ToolError,
    BatchSizeExceeded,
    SuffixNotSupported,
    NotResumable,
)
"""Errors that TGI raises before it opens a stream, or that it does not have."""
STREAM_ERROR_STATUS = 422
"""Status in an error event of OpenAI's streams, whatever the error."""


async def always(_: web.Request) -> bool:
    """Return that every request asks for a stream."""
    return True


async def asks_for_stream(request: web.Request) -> bool:
    """Return whether the body has `"stream": true`; the body has been read already."""
    body = await read_json(request)
    return isinstance(body, dict) and body.get("stream") is True


def with_errors_in_stream(
    handler: Handler,
    on_error: Callable[[RouterError], bytes],
    *,
    when: Callable[[web.Request], Awaitable[bool]] = always,
) -> Handler:
    """Answer a stream that fails before its first event with 200 and the error as its only event."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        services = request.app[SERVICES]
        try:
            return await handler(request)
        except BEFORE_STREAMS:
            raise
        except RouterError as error:
            if not (services.dialect.opens_failed_streams and await when(request)):
                raise
            headers = {**STREAM_HEADERS, "x-compute-type": services.compute_type}
            response = web.Response(body=on_error(error), headers=headers)
            response[ERROR_TYPE] = error.error_type
            return response

    return answer


def counted_again(handler: Handler) -> Handler:
    """Count a request with a readable body once more, beside the generations that it asks for."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        services = request.app[SERVICES]
        was_read = True
        try:
            return await handler(request)
        except BodyError:
            was_read = False
            raise
        finally:
            if was_read and services.dialect.counts_chats_twice:
                services.metrics.request_count.inc()

    return answer


def openai_route(handler: Handler) -> Handler:
    """Wrap a handler of an OpenAI route: idempotency keys, the form of errors, and the dialect."""
    working = idempotent(counted_again(handler))
    return openai_errors(with_errors_in_stream(working, tgi_stream_error, when=asks_for_stream))


def stream_errors(services: Services) -> Callable[[RouterError], bytes]:
    """Return the function that frames a failure in the middle of one of OpenAI's streams."""
    return tgi_stream_error if services.dialect.has_tgi_errors else stream_error


def tgi_stream_error(error: RouterError) -> bytes:
    """Frame a failure as TGI does; the stream ends as any other."""
    failure = {"error": {"message": str(error), "http_status_code": STREAM_ERROR_STATUS}}
    return event(orjson.dumps(failure)) + DONE
