"""The routes for embeddings: OpenAI's, and the one that TEI and LoRAX share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import orjson
from aiohttp import web

from millrace_router.api.adapters.naming import adapter_of_fields, adapter_of_model
from millrace_router.api.fields import Prompt, prompts_of
from millrace_router.api.openai.errors import model_name
from millrace_router.api.openai.route_wrappers import openai_route
from millrace_router.api.pooling.requests import (
    MOST_PROMPTS,
    EmbeddingFields,
    EmbeddingsRequest,
    EmbedParameters,
    EmbedRequest,
)
from millrace_router.api.pooling.run import Pooled, PoolingRun, text_or_ids
from millrace_router.api.pooling.start import asked_of, longest_prompt, usage_json
from millrace_router.api.pooling.vectors import EmbeddingForm
from millrace_router.api.request_fields.reading import read_request
from millrace_router.errors import ValidationError
from millrace_router.pooling.truncation import tokens_of
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.request import Pooling, Task
from millrace_router.server.bodies import json_response
from millrace_router.server.headers import answer_headers
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.request_start import counting_refusals
from millrace_router.server.services import SERVICES, Services
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
        given = _Given(body.input, "input", adapter_of_model(request, body.model))
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
    pooled = await _embedded(request, body, _Given(body.inputs, "inputs", adapter))
    headers = answer_headers(services, pooled.generations, pooled.usage)
    if body.parameters is None:
        return json_response(pooled.results, headers=headers)
    return json_response({"embeddings": pooled.results[0]}, headers=headers)


@dataclass(frozen=True, slots=True)
class _Given:
    """The parts of a body that have other names on the other route."""

    prompt: Prompt
    name: str
    """The field of the prompt."""
    adapter: AdapterReference | None


async def _embedded(
    request: web.Request,
    body: EmbeddingFields,
    given: _Given,
    *,
    is_base64: bool = False,
    specials: bool = True,
) -> Pooled[orjson.Fragment]:
    """Embed all prompts of a body; raises RouterError."""
    services = request.app[SERVICES]
    with counting_refusals(services.metrics):
        check_task(Task.EMBED, services.limits)
        prompts = _prompts(services, body, given)
        truncation = body.truncation(longest_prompt(services.limits))
        form = _form(services, body, is_base64=is_base64)
        asked = asked_of(
            request,
            body,
            Pooling(),
            prompt_name=given.name,
            adapter=given.adapter,
        )
    tokenize = partial(tokens_of, services.tokenizer, truncation=truncation, specials=specials)
    run = PoolingRun(
        request=request,
        asked=asked,
        prompts=[text_or_ids(prompt, tokenize) for prompt in prompts],
        render=form.render,
    )
    return await run.finish()


def _prompts(
    services: Services, body: EmbeddingFields, given: _Given
) -> list[str | tuple[int, ...]]:
    """Return the prompts, with the text that belongs before texts; raises ValidationError."""
    prompts = prompts_of(given.prompt)
    if len(prompts) > MOST_PROMPTS:
        raise ValidationError(
            f"`{given.name}` must have at most {MOST_PROMPTS} prompts. Given: {len(prompts)}"
        )
    if "" in prompts:
        raise ValidationError(f"`{given.name}` cannot be empty")
    files = services.pooling.files
    before = files.default_prompt
    if body.prompt_name is not None:
        if body.prompt_name not in files.prompts:
            known = ", ".join(sorted(files.prompts)) or "none"
            raise ValidationError(f"`prompt_name` must be one of the model's prompts: {known}")
        before = files.prompts[body.prompt_name]
    return [before + one if isinstance(one, str) else one for one in prompts]


def _form(services: Services, body: EmbeddingFields, *, is_base64: bool) -> EmbeddingForm:
    """Return the form of the embeddings; raises ValidationError."""
    most = services.shard.hidden_size
    if body.dimensions is not None and body.dimensions > most:
        raise ValidationError(
            f"`dimensions` must be <= {most}, the size of the model. Given: {body.dimensions}"
        )
    normalizes = services.pooling.files.normalizes
    if body.normalize is not None:
        normalizes = body.normalize
    return EmbeddingForm(normalizes=normalizes, dimensions=body.dimensions, is_base64=is_base64)
