"""Wrappers of handlers: the form of errors on OpenAI's routes, idempotency keys, and the dialect."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import wraps

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from typing_extensions import TypedDict

from millrace_router.api.body.adapters import NO_NAMES
from millrace_router.errors import (
    BatchSizeExceeded,
    BodyError,
    NotResumable,
    RouterError,
    SuffixNotSupported,
    TemplateError,
    ToolError,
    ValidationError,
)
from millrace_router.server.bodies import ERROR_TYPE, asks_for_stream, error_response
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.services import SERVICES, Services
from millrace_router.server.sse import DONE, STREAM_HEADERS, event
from millrace_router.version import VERSION

FIELD = re.compile(r"`([A-Za-z_][\w.\[\]]*)`")
"""The name of a field in a message."""
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


class StreamFailureJson(TypedDict):
    """Details of a failure in mid-stream."""

    message: str
    type: str
    http_status_code: int


class StreamErrorJson(TypedDict):
    """The event of a failure, before the last one of the stream."""

    error: StreamFailureJson


class FailureJson(StreamFailureJson):
    """Details of a failure, as OpenAI's clients read them."""

    param: str | None
    """The field of the request that is wrong."""
    code: str | None


class OpenAIErrorResponseJson(TypedDict):
    """A failure for OpenAI's clients, which print `error.message`, and for TGI's, which read `error_type`."""

    error: FailureJson
    error_type: str


def error_answer(error: RouterError) -> OpenAIErrorResponseJson:
    """Render a failure before the first byte."""
    return {
        "error": {**error_detail(error), "param": _field_of(error), "code": error.openai_code},
        "error_type": error.error_type,
    }


def error_detail(error: RouterError) -> StreamFailureJson:
    """Render a failure in mid-stream."""
    return {
        "message": error.client_text,
        "type": error.error_type,
        "http_status_code": error.status,
    }


def _field_of(error: RouterError) -> str | None:
    """The field of the request that is wrong: the one that a message about the request names first."""
    if not isinstance(error, ValidationError):
        return None
    named = FIELD.search(error.client_text)
    return None if named is None else named[1]


MAX_NAME_CHARS = 256


def model_name(services: Services, requested_name: str | None) -> str:
    """Return the model name for the answer: the name in the request, whatever it is, or else the served name.

    Every chunk of a stream has it, so that a long one, which is not a name, would make an answer of any size.
    """
    if requested_name in NO_NAMES:
        return services.config.served_names[0]
    return str(requested_name)[:MAX_NAME_CHARS]


def fingerprint(services: Services) -> str:
    """Name version and image, as TGI does."""
    return f"{VERSION}-{services.config.docker_label or 'native'}"


def openai_errors(handler: Handler, *, is_in_tgi: bool = True) -> Handler:
    """Answer errors before the first byte in OpenAI's form, or on routes that TGI has in the dialect's."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RouterError as error:
            if is_in_tgi and request.app[SERVICES].dialect.has_tgi_errors:
                raise
            response = error_response(error)
            response.body = orjson.dumps(error_answer(error))
            return response

    return answer


def stream_error(error: RouterError) -> bytes:
    """Frame a failure in mid-stream, with the usual end of a stream."""
    return event(orjson.dumps({"error": error_detail(error)})) + DONE


async def always(_: web.Request) -> bool:
    """Return True: every request of the route requests a stream."""
    return True


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
    """Count a request with a readable body once more, in addition to its generations."""

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
