"""What OpenAI's routes share: names, error envelopes, choices out of generations."""

from __future__ import annotations

from functools import wraps

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.api.openai.answers import error_answer, error_detail
from millrace_router.api.openai.choice import ChatDelta, ChoiceText
from millrace_router.engine.generation import Generation
from millrace_router.errors import RouterError
from millrace_router.request.events import TokenEvent
from millrace_router.request.token_stream import read_tokens
from millrace_router.server.bodies import error_response
from millrace_router.server.services import SERVICES, Services
from millrace_router.server.sse import DONE, event
from millrace_router.version import VERSION

OWN_NAME = "tgi"
"""What clients that do not care call the model."""


def model_name(services: Services, asked: str | None) -> str:
    """Name to answer with: any name is served by the one model, and echoed."""
    return services.config.model_id if asked in {None, "", OWN_NAME} else str(asked)


def fingerprint(services: Services) -> str:
    """Name version and image, as TGI does."""
    return f"{VERSION}-{services.config.docker_label or 'native'}"


def openai_errors(handler: Handler, *, is_tgi_s: bool = True) -> Handler:
    """Answer what `handler` raises before its first byte in OpenAI's envelope; on TGI's own routes TGI has another."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RouterError as error:
            if is_tgi_s and request.app[SERVICES].dialect.has_tgi_errors:
                raise
            response = error_response(error)
            response.body = orjson.dumps(error_answer(error))
            return response

    return answer


def stream_error(error: RouterError) -> bytes:
    """Frame a failure in mid-stream; the stream ends as any other."""
    return event(orjson.dumps({"error": error_detail(error)})) + DONE


async def deltas_of(generation: Generation, text: ChoiceText) -> list[ChatDelta]:
    """Read what each token adds to the choice, until a delta has a finish reason; raises RouterError."""
    deltas: list[ChatDelta] = []

    def take(token: TokenEvent) -> bool:
        deltas.append(text.push(token))
        return deltas[-1].finish_reason is not None

    await read_tokens(generation, take)
    return deltas
