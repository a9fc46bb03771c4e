"""Anthropic's messages: routes, the header of the request id, and the error envelope."""

from __future__ import annotations

from functools import partial, wraps
from http import HTTPStatus

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.api.anthropic.answers import (
    MessageHead,
    MessageStream,
    error_answer,
    may_be_retried,
    message_json,
    status_of,
    text_of,
)
from millrace_router.api.anthropic.protocol import (
    CountTokensJson,
    MessageEventJson,
    MessagesAnswerJson,
)
from millrace_router.api.anthropic.request import CountTokensRequest, MessagesRequest
from millrace_router.api.anthropic.to_chat import chat_of
from millrace_router.api.body.adapters import adapter_of_model
from millrace_router.api.body.reading import read_request
from millrace_router.api.chat.choice import reader
from millrace_router.api.chat.route import model_name
from millrace_router.api.chat.start import count_chat, start_chat
from millrace_router.errors import RouterError, ThreadsUnsupported
from millrace_router.server.access_log import REQUEST_ID
from millrace_router.server.bodies import error_response, json_response, off_loop
from millrace_router.server.headers import answer_headers, sse_options
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.operation import IDEMPOTENT, MESSAGING, NAMING, Operation
from millrace_router.server.services import SERVICES
from millrace_router.server.sse import named_event, respond

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
REQUEST_ID_HEADER = "request-id"
SHOULD_RETRY_HEADER = "x-should-retry"
"""Takes precedence over the status in Anthropic's clients."""


def is_of_messages(path: str) -> bool:
    """Whether a path is of one of these routes, or below them."""
    return f"{path}/".startswith(f"{MESSAGES}/")


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Send the request's id in the header that Anthropic's clients read; a hook of `on_response_prepare`."""
    if is_of_messages(request.path) and REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]


def messages_errors(handler: Handler) -> Handler:
    """Wrap `handler`, so that errors before the first byte have Anthropic's envelope."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RouterError as error:
            return refusal(request[REQUEST_ID], error)

    return answer


def refusal(request_id: str, error: RouterError) -> web.Response:
    """Render an error with its status."""
    status = status_of(error)
    response = error_response(error)
    response.set_status(status)
    answer = error_answer(status, text_of(error), request_id)
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


OPERATIONS = (
    Operation(
        method="post",
        path=MESSAGES,
        id="messages",
        summary="Answer a chat, as Anthropic's API does",
        body=MessagesRequest,
        answer=MessagesAnswerJson,
        event=MessageEventJson,
        failures=(*MESSAGING, *NAMING, HTTPStatus.GONE, HTTPStatus.INTERNAL_SERVER_ERROR),
        anthropic=True,
        headers=IDEMPOTENT,
    ),
    Operation(
        method="post",
        path=COUNT_TOKENS,
        id="messages_count_tokens",
        summary="Count the tokens of a chat, as Anthropic's API does",
        body=CountTokensRequest,
        answer=CountTokensJson,
        failures=MESSAGING,
        anthropic=True,
    ),
)


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    app.router.add_post(MESSAGES, messages_errors(idempotent(messages)))
    app.router.add_post(COUNT_TOKENS, messages_errors(count_tokens))
    app.on_response_prepare.append(add_request_id)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """`POST /v1/messages/count_tokens`: count the tokens of the prompt that a message would have."""
    body = await read_request(request, CountTokensRequest, generates=False)
    services = request.app[SERVICES]
    chat = await off_loop(request, partial(chat_of, body, services.dialect))
    count = await count_chat(services, chat)
    answer: CountTokensJson = {"input_tokens": count}
    return json_response(answer)


async def messages(request: web.Request) -> web.StreamResponse:
    """`POST /v1/messages`."""
    services = request.app[SERVICES]
    body = await read_request(request, MessagesRequest)
    chat = await off_loop(request, partial(chat_of, body, services.dialect))
    adapter = adapter_of_model(request, body.model)
    async with start_chat(request, chat, None, adapter) as run:
        names = run.chat.names
        head = MessageHead(
            model=model_name(services, body.model), id=f"msg_{names.digits('message', 12)}"
        )
        if body.stream:
            (generation,) = run.generations
            on_error = partial(error_event, request_id=request[REQUEST_ID])
            options = sse_options(services, run.generations, on_error)
            stream = MessageStream(generation, reader(run.chat), head)
            return await respond(request, [stream], options)
        (choice,) = await run.read()
        headers = answer_headers(services, run.generations, choice.usage)
        return json_response(message_json(head, choice), headers=headers)
