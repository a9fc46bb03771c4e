"""Parts of all of Anthropic's routes: the header of the request id, and the error envelope."""

from __future__ import annotations

from functools import wraps
from http import HTTPStatus

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.api.anthropic.answers import error_answer, may_be_retried, status_of
from millrace_router.errors import RouterError, ThreadsUnsupported
from millrace_router.server.access_log import REQUEST_ID
from millrace_router.server.bodies import error_response
from millrace_router.server.sse import named_event

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
REQUEST_ID_HEADER = "request-id"
SHOULD_RETRY_HEADER = "x-should-retry"
"""Takes precedence over the status in Anthropic's clients."""


def is_of_messages(request: web.Request) -> bool:
    """Whether a request is for one of these routes, or for a path below them."""
    return f"{request.path}/".startswith(f"{MESSAGES}/")


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Send the request's id in the header that Anthropic's clients read; a hook of `on_response_prepare`."""
    if is_of_messages(request) and REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]


def messages_errors(handler: Handler) -> Handler:
    """Wrap `handler`, so that errors before the first byte have Anthropic's envelope."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RouterError as error:
            return refusal(request, error)

    return answer


def refusal(request: web.Request, error: RouterError) -> web.Response:
    """Render an error with its status."""
    status = status_of(error)
    response = error_response(error)
    response.set_status(status)
    answer = error_answer(status, error.client_text, request[REQUEST_ID])
    if isinstance(error, ThreadsUnsupported):
        answer["error"]["details"] = error.details
    response.body = orjson.dumps(answer)
    if not may_be_retried(error):
        response.headers[SHOULD_RETRY_HEADER] = "false"
    return response


def unauthorized(request: web.Request) -> web.Response:
    """Answer a request without the right key."""
    status = HTTPStatus.UNAUTHORIZED
    answer = error_answer(status, "the API key is missing or wrong", request[REQUEST_ID])
    return web.Response(body=orjson.dumps(answer), status=status, content_type="application/json")


def error_event(error: RouterError, request_id: str) -> bytes:
    """Frame a failure in mid-stream."""
    answer = error_answer(status_of(error), error.client_text, request_id)
    return named_event("error", orjson.dumps(answer))
