"""Predicts the times of a request without running it. Not in TGI."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from aiohttp import web
from typing_extensions import TypedDict

from millrace_router.api.body.reading import request_of
from millrace_router.api.chat.start import prepare_chat
from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.tgi.lorax import adapter_of, rendered
from millrace_router.api.tgi.request import GenerateRequest
from millrace_router.errors import BodyShapeError, ValidationError
from millrace_router.prediction.forecast import Appraisal, Prediction
from millrace_router.request.adapter import ADAPTER_TOKEN_HEADER
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.server.bodies import json_response, off_loop, read_json, receive_json
from millrace_router.server.operation import ADMITTING, NAMING, SCHEDULING, Operation
from millrace_router.server.services import SERVICES, scheduling_of

KEYS = ("inputs", "messages", "prompt")


class PredictedJson(TypedDict):
    """Milliseconds from now."""

    queue_ms: float
    first_token_ms: float
    finish_ms: float


class EstimateJson(TypedDict):
    """The prediction for a request that does not run."""

    prompt_tokens: int
    max_new_tokens: int
    fits: bool
    reason: str | None
    """Why it does not fit."""
    cached_tokens: int
    """Tokens of the prompt in the prefix cache now; 0 for a request that does not fit."""
    image_tiles: int
    """Tiles of its images that have to be encoded, or 256 features of images of any size; 0 if it does not fit."""
    predicted: PredictedJson | None
    """None if nothing can be predicted, and for a request that does not fit."""
    waiting: int
    running: int


def estimate_json(appraisal: Appraisal) -> EstimateJson:
    estimate, fits = appraisal.estimate, appraisal.refusal is None
    prediction = estimate.prediction if fits else None
    return {
        "prompt_tokens": appraisal.num_prompt_tokens,
        "max_new_tokens": appraisal.max_new_tokens,
        "fits": fits,
        "reason": appraisal.refusal,
        "cached_tokens": estimate.num_cached if fits else 0,
        "image_tiles": estimate.num_tiles if fits else 0,
        "predicted": None if prediction is None else _predicted(prediction),
        "waiting": estimate.num_waiting,
        "running": estimate.num_running,
    }


def _predicted(prediction: Prediction) -> PredictedJson:
    return {
        "queue_ms": round(prediction.queue_seconds * 1000, 3),
        "first_token_ms": round(prediction.first_token_seconds * 1000, 3),
        "finish_ms": round(prediction.finish_seconds * 1000, 3),
    }


OPERATIONS = (
    Operation(
        method="post",
        path="/v1/estimate",
        id="estimate",
        summary="What would become of a request, without running it",
        body=GenerateRequest | ChatCompletionRequest | CompletionRequest,
        answer=EstimateJson,
        failures=(*ADMITTING, *NAMING),
        headers=(*SCHEDULING, ADAPTER_TOKEN_HEADER),
    ),
)


def register(app: web.Application) -> None:
    """Add the route to `app`."""
    app.router.add_post("/v1/estimate", estimate)


async def estimate(request: web.Request) -> web.StreamResponse:
    """`POST /v1/estimate`: takes the body of `/generate`, of a chat or of a completion."""
    services = request.app[SERVICES]
    await receive_json(request)
    async with services.infer.turn_aside(takes_permit=False):
        generation_request, priority = await _read(request, await read_json(request))
        scheduling = scheduling_of(request, priority)
        appraisal = await services.infer.estimate(
            replace(generation_request, scheduling=scheduling)
        )
    return json_response(estimate_json(appraisal))


async def _read(request: web.Request, body: object) -> tuple[GenerationRequest, int | None]:
    """Return the generation that a body requests, and its priority; the keys of the body determine the dialect."""
    services = request.app[SERVICES]
    keys = [key for key in KEYS if isinstance(body, dict) and key in body]
    if keys == ["inputs"]:
        native = await request_of(request, body, GenerateRequest)
        adapter = adapter_of(request, native.parameters)
        generation = await off_loop(request, native.generation)
        generation = await rendered(request, generation, native.parameters)
        return replace(generation, adapter=adapter), native.parameters.priority
    if keys == ["messages"]:
        conversation = await request_of(request, body, ChatCompletionRequest)
        chat = await off_loop(request, partial(conversation.chat, services.limits))
        adapter = conversation.adapter(request)
        prepared = await prepare_chat(services, chat, adapter=adapter)
        return prepared.request, conversation.priority
    if keys == ["prompt"]:
        completion = await request_of(request, body, CompletionRequest)
        prompts, generation = await off_loop(
            request, partial(completion.translated, services.limits)
        )
        if len(prompts) > 1:
            raise ValidationError(
                f"`prompt` must be one prompt to be estimated. Given: {len(prompts)}"
            )
        (prompt,) = prompts
        generation_request = replace(
            generation,
            prompt=prompt,
            adapter=completion.adapter(request),
        )
        return generation_request, completion.priority
    raise BodyShapeError("needs one of `inputs`, `messages` and `prompt`, and no more than one")
