"""One log line per request: route, end and durations; never its text."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from hashlib import blake2b
from http import HTTPStatus

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.access.keys import KEY_NAME
from millrace_router.engine.generation import Collected, Generation
from millrace_router.request.scheduling import named_tenant
from millrace_router.server.bodies import ERROR_TYPE
from millrace_router.server.headers import sum_of_times
from millrace_router.server.services import SERVICES
from millrace_router.server.traces import Line, Period
from millrace_router.telemetry.trace_context import (
    CURRENT,
    TRACEPARENT_HEADER,
    TraceContext,
    trace_id_of,
)

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_LENGTH = 128
MAX_TENANT_LENGTH = 128
CLIENT_GONE = 499
"""nginx's status for a client that closed the connection; it is only logged."""
PROBED_PATHS = frozenset({"/", "/health", "/ping", "/livez", "/readyz", "/metrics", "/status"})

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
SENT: web.RequestKey[web.StreamResponse] = web.RequestKey("sent", web.StreamResponse)
"""A stream that was sent to its last event, whatever becomes of the connection then."""
_GENERATIONS: web.RequestKey[list[Generation | Collected]] = web.RequestKey("generations", list)
_SALT = secrets.token_bytes(16)
"""Salt of the hashes of keys in the log, so that they reveal nothing about the keys."""

log = structlog.get_logger(__name__)


def watch(request: web.Request, *generations: Generation | Collected) -> None:
    """Add generations to the request's line."""
    request[_GENERATIONS].extend(generations)


def prepare_detached(request: web.Request, request_id: str | None) -> None:
    """Give a request that no middleware sees what its handler expects."""
    request[REQUEST_ID], request[_GENERATIONS] = _request_id(request_id), []


@web.middleware
async def access_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, and log it when it has ended, however it ended."""
    started_at = time.monotonic()
    request[REQUEST_ID] = _request_id(request.headers.get(REQUEST_ID_HEADER))
    request[_GENERATIONS] = []
    names = {"request_id": request[REQUEST_ID]}
    traces = request.app[SERVICES].traces
    context = None if traces is None else traces.begin(request.headers)
    if context is not None:
        names["trace_id"] = context.trace_id
    elif trace_id := trace_id_of(request.headers.getall(TRACEPARENT_HEADER, ())):
        names["trace_id"] = trace_id
    response: web.StreamResponse | None = None
    with structlog.contextvars.bound_contextvars(**names):
        token = None if context is None else CURRENT.set(context)
        try:
            response = await handler(request)
        finally:
            if token is not None:
                CURRENT.reset(token)
            period = started_at, time.monotonic()
            _end(request, response or request.get(SENT), names, context, period)
    return response


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Send the request's id to the client; a hook of `on_response_prepare`."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id


def _request_id(header: str | None) -> str:
    if (
        header
        and len(header) <= MAX_REQUEST_ID_LENGTH
        and header.isascii()
        and header.isprintable()
    ):
        return header
    return uuid.uuid4().hex


def _end(
    request: web.Request,
    response: web.StreamResponse | None,
    names: dict[str, str],
    context: TraceContext | None,
    period: Period,
) -> None:
    """Write the line and send the spans; without a response the client has left."""
    line = _line(request, response, period[1] - period[0])
    if request.method == "GET" and request.path in PROBED_PATHS and line["status"] == HTTPStatus.OK:
        log.debug("request", **line)
        return
    log.info("request", **line)
    services = request.app[SERVICES]
    if services.request_log is not None:
        services.request_log.write({**names, **line})
    if services.traces is not None and context is not None:
        generations = request[_GENERATIONS]
        services.traces.ended(request, line, generations, context, period)


def _line(request: web.Request, response: web.StreamResponse | None, seconds: float) -> Line:
    line: Line = {
        "method": request.method,
        "route": request.rel_url.raw_path[:200],
        "status": CLIENT_GONE if response is None else response.status,
        "total_time": round(seconds, 6),
    }
    if KEY_NAME in request:
        line["key_name"] = request[KEY_NAME]
    if request.content_length is not None:
        line["request_bytes"] = request.content_length
    if response is not None and ERROR_TYPE in response:
        line["error_type"] = response[ERROR_TYPE]
    generations = request[_GENERATIONS]
    if generations:
        line["model"] = request.app[SERVICES].config.model_id
        if (adapter := generations[0].valid.adapter) is not None:
            line["adapter"] = adapter.name
        if response is not None:
            line["stream"] = not isinstance(response, web.Response)
        line |= _counts_of(generations)
        by_tenant = request.app[SERVICES].config.fairness == "tenant"
        if by_tenant and (tenant := _tenant(request, generations[0])):
            line["tenant"] = tenant
    return line


def _counts_of(generations: Sequence[Generation | Collected]) -> Line:
    times = sum_of_times(generations)
    line: Line = {
        "prompt_tokens": sum(len(one.valid.input_ids) for one in generations),
        "cached_tokens": sum(one.cached_tokens for one in generations),
        "generated_tokens": sum(one.generated_tokens for one in generations),
        "validation_time": round(times.validation, 6),
        "queue_time": round(times.queue, 6),
        "inference_time": round(times.inference, 6),
        "time_per_token": round(times.per_token / len(generations), 6),
    }
    if times.first_token is not None:
        line["time_to_first_token"] = round(times.first_token, 6)
    if reasons := dict.fromkeys(one.finish_reason for one in generations if one.finish_reason):
        line["finish_reason"] = ",".join(reasons)
    failures = [one.error_type for one in generations if isinstance(one, Generation)]
    if error_types := [one for one in failures if one is not None]:
        line["error_type"] = error_types[0]
    sampling = generations[0].valid.sampling
    if sampling.samples:
        line["seed"] = sampling.seed
    return line


def _tenant(request: web.Request, generation: Generation | Collected) -> str:
    """Name the tenant, if tenants count: by the name that was given, or by a hash of the key that a restart changes."""
    tenant = generation.valid.scheduling.tenant
    if not tenant or tenant in (request.get(KEY_NAME), named_tenant(request.headers)):
        # JSON has no place for bytes that are not UTF-8.
        return tenant[:MAX_TENANT_LENGTH].encode(errors="backslashreplace").decode()
    return blake2b(tenant.encode(), key=_SALT, digest_size=8).hexdigest()
