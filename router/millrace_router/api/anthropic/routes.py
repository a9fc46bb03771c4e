"""Anthropic's messages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from aiohttp import web

from millrace_router.api.anthropic.answers import MessageHead, blocks_of, end_json
from millrace_router.api.anthropic.errors import (
    COUNT_TOKENS,
    MESSAGES,
    add_request_id,
    error_event,
    messages_errors,
)
from millrace_router.api.anthropic.protocol import CountTokensJson
from millrace_router.api.anthropic.request import CountTokensRequest, MessagesRequest
from millrace_router.api.anthropic.stream import MessageStream
from millrace_router.api.anthropic.to_chat import chat_of
from millrace_router.api.body.adapters import adapter_of_model
from millrace_router.api.body.request_fields.reading import read_request
from millrace_router.api.openai.errors import deltas_of, model_name
from millrace_router.api.openai.prepare import PreparedChat, prepare_chat
from millrace_router.engine.generation import Generation
from millrace_router.server.access_log import REQUEST_ID, watch
from millrace_router.server.bodies import json_response
from millrace_router.server.headers import answer_headers, sse_options
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.ignored import note_ignored
from millrace_router.server.request_start import counting_refusals, scheduling_of
from millrace_router.server.services import SERVICES, Services
from millrace_router.server.sse import respond


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    app.router.add_post(MESSAGES, messages_errors(idempotent(messages)))
    app.router.add_post(COUNT_TOKENS, messages_errors(count_tokens))
    app.on_response_prepare.append(add_request_id)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """`POST /v1/messages/count_tokens`: count the tokens of the prompt that a message would have."""
    services = request.app[SERVICES]
    body = await read_request(request, CountTokensRequest)
    note_ignored(request, body.left_out())
    with services.infer.permit():
        chat = await prepare_chat(services, chat_of(body, services.dialect))
        count = await services.validator.count(chat.request)
    answer: CountTokensJson = {"input_tokens": count}
    return json_response(answer)


async def messages(request: web.Request) -> web.StreamResponse:
    """`POST /v1/messages`."""
    services = request.app[SERVICES]
    body = await read_request(request, MessagesRequest)
    note_ignored(request, body.left_out())
    with counting_refusals(services.metrics):
        chat = await prepare_chat(services, chat_of(body, services.dialect))
        scheduling = scheduling_of(request, None)
        adapter = adapter_of_model(request, body.model)
    head = MessageHead(model=model_name(services, body.model))
    async with await services.infer.start(
        replace(chat.request, scheduling=scheduling, adapter=adapter)
    ) as generation:
        watch(request, generation)
        if not body.stream:
            return await _answer(services, generation, chat, head)
        on_error = partial(error_event, request_id=request[REQUEST_ID])
        options = sse_options(services, [generation], on_error)
        stream = MessageStream(generation, chat.text(), head)
        return await respond(request, [stream], options)


async def _answer(
    services: Services, generation: Generation, chat: PreparedChat, head: MessageHead
) -> web.Response:
    text = chat.text()
    pieces = await deltas_of(generation, text)
    usage = generation.usage(pieces[-1].num_tokens)
    finish_reason = pieces[-1].finish_reason
    assert finish_reason is not None
    answer = head.json(
        usage,
        blocks_of(pieces),
        end_json(finish_reason, text.stop_sequence),
    )
    headers = answer_headers(services, [generation], usage)
    return json_response(answer, headers=headers)
