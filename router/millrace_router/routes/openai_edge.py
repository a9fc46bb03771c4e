"""What OpenAI's routes share at their edge: names, error envelopes, counting of what is refused early."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.api.openai_answers import error_answer, error_detail
from millrace_router.bodies import error_response
from millrace_router.errors import RouterError
from millrace_router.metrics import Metrics
from millrace_router.services import Services
from millrace_router.sse import DONE, event
from millrace_router.version import VERSION

OWN_NAME = "tgi"
"""What clients that do not care call the model."""


def model_name(services: Services, asked: str | None) -> str:
    """Name to answer with: any name is served by the one model, and echoed."""
    return services.config.model_id if asked in {None, "", OWN_NAME} else str(asked)


def fingerprint() -> str:
    """Version and image, as TGI writes them."""
    return f"{VERSION}-{os.environ.get('DOCKER_LABEL') or 'native'}"


def openai_errors(handler: Handler) -> Handler:
    """Answer what `handler` raises before its first byte in OpenAI's envelope."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RouterError as error:
            response = error_response(error)
            response.body = orjson.dumps(error_answer(error))
            return response

    return answer


def stream_error(error: RouterError) -> bytes:
    """Frame a failure in mid-stream; the stream ends as any other."""
    return event(orjson.dumps({"error": error_detail(error)})) + DONE


@contextmanager
def counting_refusals(metrics: Metrics) -> Iterator[None]:
    """Count a request that fails before a generation is asked for."""
    try:
        yield
    except RouterError as error:
        metrics.request_count.inc()
        if error.failure_label is not None:
            metrics.request_failure.labels(err=error.failure_label).inc()
        raise
