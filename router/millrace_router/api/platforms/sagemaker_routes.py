"""SageMaker: one path for three kinds of bodies."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel

from millrace_router.api.completions.request import CompletionRequest
from millrace_router.api.completions.routes import completions
from millrace_router.api.openai.chat_request import ChatCompletionRequest
from millrace_router.api.openai.route_wrappers import openai_route
from millrace_router.api.openai.routes import chat_completions
from millrace_router.api.tgi.request import CompatGenerateRequest
from millrace_router.api.tgi.routes import compat
from millrace_router.errors import BodyShapeError
from millrace_router.server.bodies import read_json, to_model


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


def register(app: web.Application) -> None:
    """Add the route to `app`."""
    app.router.add_post("/invocations", invocations)


async def invocations(request: web.Request) -> web.StreamResponse:
    """`POST /invocations`: the body of `POST /`, of a chat or of a completion, answered as on its own route."""
    return await _kind_of(await read_json(request)).handler(request)


def _kind_of(body: object) -> _Kind:
    """Return the first kind that fits; if none of several fits, the first one, whose handler refuses the body."""
    kinds = [kind for kind in KINDS if isinstance(body, dict) and kind.key in body]
    if not kinds:
        raise BodyShapeError("needs one of `inputs`, `messages` and `prompt`")
    if len(kinds) > 1:
        return next((kind for kind in kinds if _fits(body, kind.model)), kinds[0])
    return kinds[0]


def _fits(body: object, model: type[BaseModel]) -> bool:
    try:
        to_model(body, model)
    except BodyShapeError:
        return False
    return True
