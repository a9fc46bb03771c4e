"""OpenAI's responses: making them, and reading stored ones."""

from __future__ import annotations

import re
from functools import partial
from http import HTTPStatus

import orjson
from aiohttp import web

from millrace_router.api.body.adapters import adapter_of_model
from millrace_router.api.chat.choice import reader
from millrace_router.api.chat.route import model_name, openai_errors
from millrace_router.api.chat.start import count_chat, start_chat
from millrace_router.api.responses.events import (
    ResponseEvents,
    ResponseHead,
    ResponseStream,
    response_json,
)
from millrace_router.api.responses.protocol import (
    DeletedResponseJson,
    InputItemsJson,
    InputTokensJson,
    ResponseEventJson,
    ResponseJson,
)
from millrace_router.api.responses.request import ResponsesRequest
from millrace_router.api.responses.store import (
    STORE,
    Json,
    ResponseStore,
    StoredResponse,
    read_stored,
    tenant_of,
)
from millrace_router.api.responses.to_chat import chat_of
from millrace_router.errors import NotStored, ValidationError
from millrace_router.server.bodies import json_response, off_loop
from millrace_router.server.headers import answer_headers, sse_options
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.operation import ADMITTING, GENERATING, IDEMPOTENT, Operation
from millrace_router.server.services import SERVICES
from millrace_router.server.sse import respond

RESPONSES = "/v1/responses"
INPUT_TOKENS = RESPONSES + "/input_tokens"
RESPONSE = RESPONSES + "/{id}"
INPUT_ITEMS = RESPONSE + "/input_items"
MAX_ITEMS = 100
USUAL_ITEMS = 20
"""Items in one answer by default; `MAX_ITEMS` is the most."""
MIB = 2**20
_NUMBER = re.compile(r"[0-9]{1,4}")

STORED = (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
OPERATIONS = (
    Operation(
        method="post",
        path=RESPONSES,
        id="responses",
        summary="Answer a conversation, or a text",
        body=ResponsesRequest,
        answer=ResponseJson,
        event=ResponseEventJson,
        failures=GENERATING,
        openai=True,
        headers=IDEMPOTENT,
    ),
    Operation(
        method="post",
        path=INPUT_TOKENS,
        id="responses_input_tokens",
        summary="Count the tokens of a conversation, or a text",
        body=ResponsesRequest,
        answer=InputTokensJson,
        failures=ADMITTING,
        openai=True,
    ),
    Operation(
        method="get",
        path=RESPONSE,
        id="get_response",
        summary="A stored response",
        answer=ResponseJson,
        failures=STORED,
        openai=True,
    ),
    Operation(
        method="delete",
        path=RESPONSE,
        id="delete_response",
        summary="Forget a stored response",
        answer=DeletedResponseJson,
        failures=STORED,
        openai=True,
    ),
    Operation(
        method="get",
        path=INPUT_ITEMS,
        id="get_response_input_items",
        summary="The items that a stored response is an answer to",
        answer=InputItemsJson,
        failures=STORED,
        openai=True,
    ),
)


def register(app: web.Application) -> None:
    """Add the routes and the store to `app`."""
    config = app[SERVICES].config
    app[STORE] = ResponseStore(config.responses_store * MIB, config.responses_store_seconds)
    wrapped = partial(openai_errors, is_in_tgi=False)
    app.router.add_post(RESPONSES, wrapped(idempotent(responses)))
    app.router.add_post(INPUT_TOKENS, wrapped(input_tokens))
    app.router.add_get(RESPONSE, wrapped(get_response))
    app.router.add_delete(RESPONSE, wrapped(delete_response))
    app.router.add_get(INPUT_ITEMS, wrapped(get_input_items))


async def input_tokens(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses/input_tokens`: count the tokens of the prompt that a response would have."""
    stored = await read_stored(request)
    services = request.app[SERVICES]
    chat = await off_loop(request, partial(chat_of, stored.body, services.dialect))
    count = await count_chat(services, chat)
    answer: InputTokensJson = {"object": "response.input_tokens", "input_tokens": count}
    return json_response(answer)


async def responses(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`."""
    services = request.app[SERVICES]
    stored = await read_stored(request)
    body = stored.body
    chat = await off_loop(request, partial(chat_of, body, services.dialect))
    adapter = adapter_of_model(request, body.model)
    async with start_chat(request, chat, body.priority, adapter) as run:
        head = ResponseHead(
            body,
            model=model_name(services, body.model),
            names=run.chat.names,
            defaults=services.validator.defaults,
            is_stored=stored.is_stored,
        )
        events = ResponseEvents(head, stored.keep)
        if body.stream:
            (generation,) = run.generations
            stream = ResponseStream(generation, reader(run.chat), events)
            return await respond(
                request, [stream], sse_options(services, run.generations, stream.failure)
            )
        (choice,) = await run.read()
        headers = answer_headers(services, run.generations, choice.usage)
        return json_response(response_json(events, choice), headers=headers)


async def get_response(request: web.Request) -> web.StreamResponse:
    """`GET /v1/responses/{id}`."""
    stored = _stored(request)
    if request.query.get("stream") == "true":
        raise ValidationError("`stream` is not supported for a stored response: read it whole")
    return web.Response(body=stored.response, content_type="application/json")


async def delete_response(request: web.Request) -> web.StreamResponse:
    """`DELETE /v1/responses/{id}`."""
    id_, store = request.match_info["id"], request.app[STORE]
    if not store.delete(tenant_of(request), id_):
        raise NotStored(id_, are_stored=store.is_on)
    answer: DeletedResponseJson = {"id": id_, "object": "response", "deleted": True}
    return json_response(answer)


async def get_input_items(request: web.Request) -> web.StreamResponse:
    """`GET /v1/responses/{id}/input_items`: the last first, unless `order` is `asc`."""
    items: list[Json] = [orjson.loads(item) for item in _stored(request).input_items]
    order = request.query.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise ValidationError("`order` must be `asc` or `desc`")
    if order == "desc":
        items.reverse()
    after = request.query.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ValidationError("`after` must be the id of one of the items")
        items = items[ids.index(after) + 1 :]
    limit = _limit(request.query.get("limit"))
    shown = items[:limit]
    answer: InputItemsJson = {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }
    return json_response(answer)


def _stored(request: web.Request) -> StoredResponse:
    """Return the response that the path names; raises NotStored."""
    id_, store = request.match_info["id"], request.app[STORE]
    response = store.find(tenant_of(request), id_)
    if response is None:
        raise NotStored(id_, are_stored=store.is_on)
    return response


def _limit(text: str | None) -> int:
    if text is None:
        return USUAL_ITEMS
    if _NUMBER.fullmatch(text) is None or not 1 <= int(text) <= MAX_ITEMS:
        raise ValidationError(f"`limit` must be from 1 to {MAX_ITEMS}")
    return int(text)
