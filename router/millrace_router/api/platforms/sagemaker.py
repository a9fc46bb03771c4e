"""SageMaker: one path for the bodies of three other routes, with TGI's names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel
from typing_extensions import TypeAliasType

from millrace_router.api.body.reading import admitted
from millrace_router.api.chat.route import openai_route
from millrace_router.api.openai.completion_routes import completions
from millrace_router.api.openai.protocol import (
    ChatCompletionChunkJson,
    ChatCompletionJson,
    ChunkJson,
    CompletionFinalJson,
)
from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.openai.routes import chat_completions
from millrace_router.api.tgi.answers import GenerateResponse, StreamResponse
from millrace_router.api.tgi.request import CompatGenerateRequest
from millrace_router.api.tgi.routes import compat
from millrace_router.errors import BodyShapeError
from millrace_router.server.bodies import off_loop, read_json, to_model
from millrace_router.server.operation import GENERATING, IDEMPOTENT, Operation

SagemakerRequest = TypeAliasType(
    "SagemakerRequest", CompatGenerateRequest | ChatCompletionRequest | CompletionRequest
)
"""Body of `/invocations`."""
SagemakerResponse = TypeAliasType(
    "SagemakerResponse", list[GenerateResponse] | ChatCompletionJson | CompletionFinalJson
)
"""Answer of `/invocations`, in one piece."""
SagemakerStreamResponse = TypeAliasType(
    "SagemakerStreamResponse",
    StreamResponse | ChatCompletionChunkJson | ChunkJson | CompletionFinalJson,
)
"""One event of a stream of `/invocations`."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Bodies with the key `key`, and their handler."""

    key: str
    model: type[BaseModel]
    handler: Handler


KINDS = (
    _Kind("inputs", CompatGenerateRequest, compat),
    _Kind("messages", ChatCompletionRequest, openai_route(chat_completions)),
    _Kind("prompt", CompletionRequest, openai_route(completions)),
)
"""In the order in which TGI tries them."""

OPERATIONS = (
    Operation(
        method="post",
        path="/invocations",
        id="sagemaker_compatibility",
        summary="Generate, chat or complete, depending on the body; for SageMaker",
        body=SagemakerRequest,
        answer=SagemakerResponse,
        event=SagemakerStreamResponse,
        has_end=True,
        failures=GENERATING,
        either=True,
        headers=IDEMPOTENT,
    ),
)


def register(app: web.Application) -> None:
    """Add the route to `app`."""
    app.router.add_post("/invocations", invocations)


async def invocations(request: web.Request) -> web.StreamResponse:
    """`POST /invocations`: the body of `POST /`, of a chat or of a completion, answered as on its own route."""
    async with admitted(request):
        body = await read_json(request, again=True)
        kind = await off_loop(request, partial(_kind_of, body))
    return await kind.handler(request)


def _kind_of(body: object) -> _Kind:
    """Return the first kind that fits; if none of several fits, the first one, whose handler refuses the body."""
    candidates = [kind for kind in KINDS if isinstance(body, dict) and kind.key in body]
    if not candidates:
        raise BodyShapeError("needs one of `inputs`, `messages` and `prompt`")
    if len(candidates) > 1:
        return next((kind for kind in candidates if _fits(body, kind.model)), candidates[0])
    return candidates[0]


def _fits(body: object, model: type[BaseModel]) -> bool:
    try:
        to_model(body, model)
    except BodyShapeError:
        return False
    return True
