"""OpenAI's chat and model list, in TGI's shapes."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from pathlib import PurePath

import orjson
from aiohttp import web

from millrace_router.adapters.names import Registration
from millrace_router.api.body.adapters import token_of
from millrace_router.api.body.reading import read_request
from millrace_router.api.chat.route import counted_again, openai_errors, openai_route, stream_errors
from millrace_router.api.chat.start import prepare_chat, start_chat
from millrace_router.api.openai.protocol import (
    ChatCompletionChunkJson,
    ChatCompletionJson,
    ChatTokenizeResponseJson,
    ModelInfoJson,
    ModelJson,
)
from millrace_router.api.openai.render import chat_answer
from millrace_router.api.openai.request import ChatCompletionRequest
from millrace_router.api.openai.stream import chat_streams
from millrace_router.errors import UnknownModel
from millrace_router.request.adapter import AdapterSource
from millrace_router.server.bodies import json_response, off_loop
from millrace_router.server.headers import answer_headers, sse_options
from millrace_router.server.operation import ADMITTING, GENERATING, IDEMPOTENT, Operation
from millrace_router.server.services import SERVICES, Services
from millrace_router.server.sse import respond, send_large

CHAT_OPERATIONS = (
    Operation(
        method="post",
        path="/chat_tokenize",
        id="get_chat_tokenize",
        summary="Turn a chat into a prompt, and tokenize it",
        body=ChatCompletionRequest,
        answer=ChatTokenizeResponseJson,
        failures=ADMITTING,
        foreign=(HTTPStatus.NOT_FOUND,),
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        id="chat_completions",
        summary="Answer a chat",
        body=ChatCompletionRequest,
        answer=ChatCompletionJson,
        event=ChatCompletionChunkJson,
        has_end=True,
        failures=GENERATING,
        openai=True,
        headers=IDEMPOTENT,
    ),
)
MODEL_OPERATIONS = (
    Operation(
        method="get",
        is_open=True,
        path="/v1/models",
        id="openai_get_model_info",
        summary="The model that is served, and the adapters that the client may use",
        answer=ModelInfoJson,
        foreign=(HTTPStatus.NOT_FOUND,),
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        id="get_model",
        summary="The model that is served, or an adapter, by its name",
        answer=ModelJson,
        failures=(HTTPStatus.NOT_FOUND,),
        openai=True,
    ),
)


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    app.router.add_post("/v1/chat/completions", openai_route(chat_completions))
    app.router.add_get("/v1/models", models)
    # Names may have slashes.
    app.router.add_get("/v1/models/{model:.+}", openai_errors(model))
    app.router.add_post("/chat_tokenize", counted_again(chat_tokenize))


async def models(request: web.Request) -> web.StreamResponse:
    """`GET /v1/models`: the one that is served, by each of its names, and the adapters that the client may use."""
    data = [*_models(request.app[SERVICES]), *adapters_json(request)]
    answer: ModelInfoJson = {"object": "list", "data": data}
    return json_response(answer)


async def model(request: web.Request) -> web.StreamResponse:
    """`GET /v1/models/{model}`: the one that is served, or an adapter of it, by its name."""
    name = request.match_info["model"]
    known = [*_models(request.app[SERVICES]), *adapters_json(request)]
    model_json = next((one for one in known if one["id"] == name), None)
    if model_json is None:
        raise UnknownModel(name)
    return json_response(model_json)


def _models(services: Services) -> list[ModelJson]:
    return [
        {"id": name, "object": "model", "created": 0, "owned_by": name}
        for name in services.config.served_names
    ]


async def chat_tokenize(request: web.Request) -> web.StreamResponse:
    """`POST /chat_tokenize`: the prompt that a chat becomes, and its tokens."""
    services = request.app[SERVICES]
    body = await read_request(request, ChatCompletionRequest, generates=False)
    async with services.infer.turn_aside():
        chat = await off_loop(request, partial(body.chat, services.limits))
        prepared = (await prepare_chat(services, chat)).request
        prompt, adds = prepared.text, prepared.adds_special_tokens
        tokens = await services.validator.tokenize(prompt, adds_special_tokens=adds)
    text = orjson.dumps(prompt)
    return await send_large(
        request, b'{"tokenize_response":', tokens, b',"templated_text":', text, b"}"
    )


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    services = request.app[SERVICES]
    body = await read_request(request, ChatCompletionRequest)
    chat = await off_loop(request, partial(body.chat, services.limits))
    adapter = body.adapter(request)
    async with start_chat(request, chat, body.priority, adapter) as run:
        headers = body.lorax_headers(services, adapter)
        if body.stream:
            options = sse_options(services, run.generations, stream_errors(services), headers)
            return await respond(request, chat_streams(run, body), options)
        answer, usage = await chat_answer(run, body)
        headers = {**answer_headers(services, run.generations, usage), **headers}
        return json_response(answer, headers=headers)


def adapters_json(request: web.Request) -> list[ModelJson]:
    """List the adapters that the client may use: registered ones, and ids that its token for the hub opened.

    The list of models needs no key, but names of adapters may be names of customers: without the key there are none.
    """
    services = request.app[SERVICES]
    resolver = services.adapters
    if resolver is None or not services.keys.admit(request.headers):
        return []
    token = token_of(request, None)
    opened = [] if token is None else resolver.named_by(token)
    return [
        *(_registered(services, one) for one in resolver.registry),
        *(_model(services, name, root=name) for name in opened),
    ]


def _registered(services: Services, registration: Registration) -> ModelJson:
    source = registration.source
    is_folder = source.kind is AdapterSource.LOCAL
    root = PurePath(source.location).name if is_folder else source.location
    return _model(services, registration.name, root=root)


def _model(services: Services, name: str, *, root: str) -> ModelJson:
    served = services.config.served_names[0]
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": served,
        "root": root,
        "parent": served,
    }
