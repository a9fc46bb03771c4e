"""Vertex AI: one prediction for each instance, which is a text or a chat."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import orjson
from aiohttp import web
from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from millrace_router.api.body.fields import FieldScope, NullIs, RequestModel
from millrace_router.api.body.reading import read_request
from millrace_router.api.chat.route import counted_again
from millrace_router.api.chat.start import start_chat
from millrace_router.api.openai.render import chat_renderer
from millrace_router.api.openai.request import ChatCompletionRequest
from millrace_router.api.platforms.common import (
    IncompletePrediction,
    NoInstances,
    check_count,
    gather,
)
from millrace_router.api.tgi.probes import health
from millrace_router.api.tgi.request import GenerateParameters, GenerateRequest, sampling_parameters
from millrace_router.api.tgi.routes import generated
from millrace_router.errors import RouterError, ValidationError
from millrace_router.server.bodies import json_response, off_loop
from millrace_router.server.operation import NAMED, PREDICTING, Operation
from millrace_router.server.services import SERVICES, Services, count_refusal, counting_refusals

PATH = "/vertex"


class GenerateVertexInstance(RequestModel):
    """A text to continue; absent parameters sample, as on all routes."""

    scope = FieldScope.GENERATE

    inputs: str
    parameters: Annotated[GenerateParameters, NullIs(sampling_parameters)] = Field(
        default_factory=sampling_parameters
    )


def _key_of(instance: Any) -> str | None:  # noqa: ANN401
    """Return the key that determines the kind of an instance; the text has precedence, as in TGI."""
    if isinstance(instance, dict):
        return next((key for key in ("inputs", "messages") if key in instance), None)
    return None


VertexInstance = Annotated[
    Annotated[GenerateVertexInstance, Tag("inputs")]
    | Annotated[ChatCompletionRequest, Tag("messages")],
    Discriminator(
        _key_of,
        custom_error_type="no_instance",
        custom_error_message="one of `inputs` and `messages` is needed",
    ),
]


class VertexRequest(RequestModel):
    """Body of `/vertex`."""

    scope = FieldScope.VERTEX

    instances: Annotated[list[VertexInstance], Field(fail_fast=True)]


class VertexResponse(TypedDict):
    """Answer of `/vertex`: a text for each instance, in their order."""

    predictions: list[str]


OPERATIONS = (
    Operation(
        method="post",
        path=PATH,
        id="vertex_compatibility",
        summary="Predict a text for each instance; for Vertex AI",
        body=VertexRequest,
        answer=VertexResponse,
        failures=PREDICTING,
        headers=NAMED,
    ),
)


def register(app: web.Application) -> None:
    """Add the routes to `app`, after all others: the platform's paths may already be other routes."""
    config = app[SERVICES].config
    predict = counted_again(vertex)
    app.router.add_post(PATH, predict)
    if config.aip_predict_route and _is_new(app, "POST", config.aip_predict_route):
        app.router.add_post(config.aip_predict_route, predict)
    if config.aip_health_route and _is_new(app, "GET", config.aip_health_route):
        app.router.add_get(config.aip_health_route, health)


async def vertex(request: web.Request) -> web.StreamResponse:
    """`POST /vertex`."""
    services = request.app[SERVICES]
    body = await read_request(request, VertexRequest)
    with counting_refusals(services.metrics):
        _check(body, services)
    works = [_predict(request, one, index) for index, one in enumerate(body.instances)]
    answer: VertexResponse = {"predictions": await gather(works)}
    return json_response(answer)


def _is_new(app: web.Application, method: str, path: str) -> bool:
    """Return whether the path has no route yet: platforms are often configured with an existing one."""
    return all(
        route.resource is None or (route.method, route.resource.canonical) != (method, path)
        for route in app.router.routes()
    )


def _check(body: VertexRequest, services: Services) -> None:
    if not body.instances:
        if services.dialect.hides_platform_errors:
            raise NoInstances
        raise ValidationError("`instances` cannot be empty")
    check_count(len(body.instances), services.limits)


async def _predict(request: web.Request, instance: VertexInstance, index: int) -> str:
    """Answer one instance; raises RouterError."""
    services = request.app[SERVICES]
    try:
        if isinstance(instance, ChatCompletionRequest):
            return await _chat(request, instance, index)
        return await _text(request, instance, index)
    except RouterError as error:
        # TGI reports what is wrong with a chat before its generation starts.
        is_shown = isinstance(instance, ChatCompletionRequest) and not error.is_counted
        count_refusal(services.metrics, error)
        if services.dialect.hides_platform_errors and not is_shown:
            raise IncompletePrediction from error
        raise


async def _text(request: web.Request, instance: GenerateVertexInstance, index: int) -> str:
    parameters = instance.parameters
    if request.app[SERVICES].dialect.limits_vertex_parameters:
        parameters = GenerateParameters(
            do_sample=True, max_new_tokens=parameters.max_new_tokens, seed=parameters.seed
        )
    answer, _ = await generated(
        request, GenerateRequest(inputs=instance.inputs, parameters=parameters), index
    )
    return answer["generated_text"]


async def _chat(request: web.Request, body: ChatCompletionRequest, index: int) -> str:
    """Return the assistant's text; a message with tool calls becomes JSON, because the calls are not text."""
    services = request.app[SERVICES]
    # An instance has one prediction, whatever its `n`.
    chat = await off_loop(request, partial(body.chat, services.limits))
    chat, adapter = replace(chat, num_choices=1), body.adapter(request)
    async with start_chat(request, chat, body.priority, adapter, index) as run:
        (choice,) = await run.read()
    message = chat_renderer(services, body, run.chat.names).choice(0, choice.deltas)["message"]
    if any(delta.calls for delta in choice.deltas):
        return orjson.dumps(message).decode()
    return message["content"] or ""
