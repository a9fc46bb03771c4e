"""OpenAI's responses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from aiohttp import web

from millrace_router.api.body.adapters import adapter_of_model
from millrace_router.api.openai.errors import deltas_of, model_name, openai_errors
from millrace_router.api.openai.prepare import PreparedChat, prepare_chat
from millrace_router.api.responses import store_routes
from millrace_router.api.responses.answers import ResponseHead
from millrace_router.api.responses.conversation import read_asked
from millrace_router.api.responses.events import ResponseEvents
from millrace_router.api.responses.protocol import InputTokensJson
from millrace_router.api.responses.stream import ResponseStream
from millrace_router.api.responses.to_chat import chat_of
from millrace_router.engine.generation import Generation
from millrace_router.server.access_log import watch
from millrace_router.server.bodies import json_response
from millrace_router.server.headers import answer_headers, sse_options
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.request_start import counting_refusals, scheduling_of
from millrace_router.server.services import SERVICES, Services
from millrace_router.server.sse import respond

RESPONSES = "/v1/responses"
INPUT_TOKENS = RESPONSES + "/input_tokens"


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    wrapped = partial(openai_errors, is_in_tgi=False)
    app.router.add_post(RESPONSES, wrapped(idempotent(responses)))
    app.router.add_post(INPUT_TOKENS, wrapped(input_tokens))
    store_routes.register(app)


async def input_tokens(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses/input_tokens`: count the tokens of the prompt that a response would have."""
    services = request.app[SERVICES]
    asked = await read_asked(request)
    with services.infer.permit():
        chat = await prepare_chat(services, chat_of(asked.body, services.dialect))
        count = await services.validator.count(chat.request)
    answer: InputTokensJson = {"object": "response.input_tokens", "input_tokens": count}
    return json_response(answer)


async def responses(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`."""
    services = request.app[SERVICES]
    asked = await read_asked(request)
    body = asked.body
    with counting_refusals(services.metrics):
        chat = await prepare_chat(services, chat_of(body, services.dialect))
        scheduling = scheduling_of(request, body.priority)
        adapter = adapter_of_model(request, body.model)
    head = ResponseHead(
        body,
        model=model_name(services, body.model),
        defaults=services.validator.defaults,
        is_stored=asked.is_stored,
    )
    events = ResponseEvents(head, asked.keep)
    async with await services.infer.start(
        replace(chat.request, scheduling=scheduling, adapter=adapter)
    ) as generation:
        watch(request, generation)
        if not body.stream:
            return await _answer(services, generation, chat, events)
        stream = ResponseStream(generation, chat.text(), events)
        options = sse_options(services, [generation], stream.failure)
        return await respond(request, [stream], options)


async def _answer(
    services: Services, generation: Generation, chat: PreparedChat, events: ResponseEvents
) -> web.Response:
    text = chat.text()
    for last in await deltas_of(generation, text):
        for _ in events.push(last):
            pass
    assert last.finish_reason is not None
    usage = generation.usage(last.num_tokens, text.reasoning_tokens)
    *_, end = events.end(usage, last.finish_reason)
    headers = answer_headers(services, [generation], usage)
    return json_response(end["response"], headers=headers)
