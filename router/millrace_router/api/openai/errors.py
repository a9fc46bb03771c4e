"""Parts that OpenAI's routes share: model names, the form of errors, and the reader of a choice."""

from __future__ import annotations

from functools import wraps

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.api.body.adapters import NO_NAMES
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


def model_name(services: Services, asked: str | None) -> str:
    """Return the name of the model in the answer: the client's, whatever it is, or else that of the model."""
    return services.config.served_names[0] if asked in NO_NAMES else str(asked)


def fingerprint(services: Services) -> str:
    """Name version and image, as TGI does."""
    return f"{VERSION}-{services.config.docker_label or 'native'}"


def openai_errors(handler: Handler, *, is_in_tgi: bool = True) -> Handler:
    """Answer errors before the first byte in OpenAI's form, or on routes that TGI has in the dialect's."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RouterError as error:
            if is_in_tgi and request.app[SERVICES].dialect.has_tgi_errors:
                raise
            response = error_response(error)
            response.body = orjson.dumps(error_answer(error))
            return response

    return answer


def stream_error(error: RouterError) -> bytes:
    """Frame a failure in mid-stream, with the usual end of a stream."""
    return event(orjson.dumps({"error": error_detail(error)})) + DONE


async def deltas_of(generation: Generation, text: ChoiceText) -> list[ChatDelta]:
    """Read what each token adds to the choice, until a delta has a finish reason; raises RouterError."""
    deltas: list[ChatDelta] = []

    def take(token: TokenEvent) -> bool:
        deltas.append(text.push(token))
        return deltas[-1].finish_reason is not None

    await read_tokens(generation, take)
    return deltas
