"""The routes for embeddings: OpenAI's, and the one that TEI and LoRAX share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import orjson
from aiohttp import web

from millrace_router.api.body.adapters import adapter_of_fields, adapter_of_model
from millrace_router.api.body.request_fields.reading import read_request
from millrace_router.api.openai.errors import model_name
from millrace_router.api.openai.route_wrappers import openai_route
from millrace_router.api.pooling.embedding_run import Given, embedding_run
from millrace_router.api.pooling.requests import (
    EmbeddingFields,
    EmbeddingsRequest,
    EmbedParameters,
    EmbedRequest,
)
from millrace_router.api.pooling.run import Pooled
from millrace_router.api.pooling.start import usage_json
from millrace_router.request.request import Task
from millrace_router.server.access_log import watch
from millrace_router.server.bodies import json_response
from millrace_router.server.headers import answer_headers
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.request_start import counting_refusals, scheduling_of
from millrace_router.server.services import SERVICES
from millrace_router.validation.rules import check_task


def register(app: web.Application) -> None:
    """Add the routes to `app`; a server that only embeds has TEI's at `/`, too."""
    app.router.add_post("/v1/embeddings", openai_route(embeddings))
    app.router.add_post("/embed", idempotent(embed))
    if app[SERVICES].limits.tasks == {Task.EMBED}:
        app.router.add_post("/", idempotent(embed))


async def embeddings(request: web.Request) -> web.StreamResponse:
    """`POST /v1/embeddings`."""
    services = request.app[SERVICES]
    body = await read_request(request, EmbeddingsRequest)
    with counting_refusals(services.metrics):
        given = Given(body.input, "input", adapter_of_model(request, body.model))
    is_base64 = body.encoding_format == "base64"
    specials = body.add_special_tokens is not False
    pooled = await _embedded(request, body, given, is_base64=is_base64, specials=specials)
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": one}
            for index, one in enumerate(pooled.results)
        ],
        "model": model_name(services, body.model),
        "usage": usage_json(pooled.usage),
    }
    headers = answer_headers(services, pooled.generations, pooled.usage)
    return json_response(answer, headers=headers)


async def embed(request: web.Request) -> web.StreamResponse:
    """`POST /embed`: TEI's, or with `parameters` LoRAX's."""
    services = request.app[SERVICES]
    body = await read_request(request, EmbedRequest)
    parameters = body.parameters or EmbedParameters()
    with counting_refusals(services.metrics):
        adapter = adapter_of_fields(
            request,
            adapter_id=parameters.adapter_id,
            source=parameters.adapter_source,
            token=parameters.api_token,
        )
    pooled = await _embedded(request, body, Given(body.inputs, "inputs", adapter))
    headers = answer_headers(services, pooled.generations, pooled.usage)
    if body.parameters is None:
        return json_response(pooled.results, headers=headers)
    return json_response({"embeddings": pooled.results[0]}, headers=headers)


async def _embedded(
    request: web.Request,
    body: EmbeddingFields,
    given: Given,
    *,
    is_base64: bool = False,
    specials: bool = True,
) -> Pooled[orjson.Fragment]:
    """Embed all prompts of a body; raises RouterError."""
    services = request.app[SERVICES]
    with counting_refusals(services.metrics):
        check_task(Task.EMBED, services.limits)
        run = embedding_run(
            services,
            body,
            given,
            lambda form: replace(form, is_base64=is_base64).render,
            specials=specials,
            scheduling=scheduling_of(request, body.priority),
            on_start=partial(watch, request),
        )
    return await run.finish()
