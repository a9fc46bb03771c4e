"""The HTTP application: its routes, and the middlewares of all of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from http import HTTPStatus

import orjson
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from millrace_router.access.keys import KEY_NAME, ApiKeys
from millrace_router.api.admin import routes as adapter_routes
from millrace_router.api.anthropic import routes as anthropic_routes
from millrace_router.api.anthropic.routes import is_of_messages, refusal, unauthorized
from millrace_router.api.body.foreign_routes import foreign_route
from millrace_router.api.chat.route import error_answer
from millrace_router.api.openai import completion_routes
from millrace_router.api.openai import routes as openai_routes
from millrace_router.api.openapi import document
from millrace_router.api.openapi.document import OPERATIONS
from millrace_router.api.pages import routes as page_routes
from millrace_router.api.platforms import kserve, sagemaker, vertex
from millrace_router.api.pooling import routes as pooling_routes
from millrace_router.api.responses import routes as responses_routes
from millrace_router.api.tgi import estimate, probes, tokenizer
from millrace_router.api.tgi import routes as tgi_routes
from millrace_router.config import RouterConfig
from millrace_router.errors import (
    BodyError,
    ForeignPath,
    HeadError,
    HeadSizeError,
    RouterError,
    UnknownPath,
    WrongMethod,
    WrongTask,
    is_failure,
)
from millrace_router.process import most_connections
from millrace_router.request.request import Task
from millrace_router.server.access_log import REQUEST_ID, access_log, add_request_id
from millrace_router.server.bodies import error_response, plain_response, prepare_parser
from millrace_router.server.connections import (
    CONNECTIONS,
    MAX_BYTES,
    MAX_FIELD_BYTES,
    MAX_HEAD_BYTES,
    Connections,
    Runner,
)
from millrace_router.server.headers import prepare_app
from millrace_router.server.idempotency import Runs
from millrace_router.server.idempotent_route import (
    END_OPERATION,
    KEPT,
    RUNS,
    Kept,
    end_request,
    end_runs,
)
from millrace_router.server.services import SERVICES, Services, counting_refusals
from millrace_router.start.shards import batch_size
from millrace_router.telemetry.load_report import FORMAT_HEADER, REPORT_HEADER, LoadReport
from millrace_router.validation.rules import check_task

OPEN_PATHS = frozenset(operation.path for operation in OPERATIONS if operation.is_open)
"""Paths that can be read without the API key."""
ADMIN_PATHS = frozenset(operation.path for operation in OPERATIONS if operation.is_admin)
"""Paths that need the admin key in place of the API key."""
GENERATING_PATHS = frozenset(
    operation.path
    for operation in OPERATIONS
    if operation.method == "post"
    and HTTPStatus.INTERNAL_SERVER_ERROR in operation.failures
    and operation not in pooling_routes.OPERATIONS
) - {"/"}
"""Paths that generate text; on servers for embeddings or scores `/` is another route."""
ALLOWED_HEADERS = (
    "content-type,authorization,x-priority,x-tenant,x-max-queue-ms,x-adapter-token,"
    "idempotency-key,last-event-id,x-millrace-stream"
)
"""Headers that a browser may send; if it names others, it may send those."""
OPENAI_PREFIX = "/v1/"
UNREAD_SHARE = 4
"""One permit in this many may be of requests with a key whose clients have left."""
RESPONSE_SECONDS = 5.0
"""Seconds for answers that are still being written at the end, when no generation runs."""
VARY = "origin, access-control-request-method, access-control-request-headers"
ResponseHook = Callable[[web.Request, web.StreamResponse], Awaitable[None]]
"""Changes the headers of a response before they are sent."""

log = structlog.get_logger(__name__)


def create_app(services: Services) -> web.Application:
    """Assemble the application; its only state is `services`."""
    config = services.config
    middlewares: list[Middleware] = [access_log, answer_preflight, describe_errors]
    if services.keys.are_required:
        middlewares.append(require_key(services.keys, _open_paths(config)))
    if Task.GENERATE not in services.limits.tasks:
        middlewares.append(refuse_generation)
    app = web.Application(middlewares=middlewares, client_max_size=config.payload_limit)
    app[SERVICES] = services
    _bound_clients(app, services)
    app.on_cleanup.append(end_runs)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(report_load(LoadReport(services.metrics, batch_size(config))))
    prepare_app(app)
    app.on_response_prepare.append(allow_origins(config.cors_allow_origin))
    tgi_routes.register(app)
    probes.register(app)
    openai_routes.register(app)
    completion_routes.register(app)
    adapter_routes.register(app)
    anthropic_routes.register(app)
    responses_routes.register(app)
    pooling_routes.register(app)
    estimate.register(app)
    document.register(app)
    page_routes.register(app)
    sagemaker.register(app)
    kserve.register(app)
    tokenizer.register(app)
    vertex.register(app)
    app.router.add_delete(END_OPERATION.path, end_request)
    return app


def _bound_clients(app: web.Application, services: Services) -> None:
    """Bound what clients hold: connections, memory of bodies, the parser, and permits of unread answers."""
    metrics, permits = services.metrics, services.infer.permits
    app[CONNECTIONS] = Connections(
        max_open=most_connections(),
        max_bytes=max(MAX_BYTES, 4 * services.config.payload_limit),
        on_closed=lambda bound: metrics.connections_closed.labels(bound=bound).inc(),
    )
    prepare_parser(app)
    runs = app[RUNS] = Runs(
        services.config.resume_grace, max_unread=max(1, permits.total // UNREAD_SHARE)
    )
    app[KEPT] = Kept()
    services.infer.make_room = runs.make_room


def create_runner(services: Services) -> web.AppRunner:
    """Make the runner of the application."""
    return Runner(
        create_app(services), partial(_refuse_head, services), shutdown_timeout=RESPONSE_SECONDS
    )


def _refuse_head(services: Services, path: str, is_long: bool) -> web.Response:  # noqa: FBT001
    """Answer a head that cannot be read, in the form of its route."""
    error = HeadSizeError(MAX_FIELD_BYTES, MAX_HEAD_BYTES) if is_long else HeadError()
    if services.dialect.has_tgi_errors:
        return plain_response(error)
    return _in_envelope(path, error, services, uuid.uuid4().hex)


@web.middleware
async def describe_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into an answer that describes it."""
    try:
        return await handler(request)
    except BodyError as error:
        is_plain = request.app[SERVICES].dialect.has_tgi_errors
        return plain_response(error) if is_plain else error_response(error)
    except RouterError as error:
        return error_response(error)
    except web.HTTPException as error:
        return _misdirected(request, error)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        # A defect in one request must not end the process.
        log.exception("request failed")
        return _in_envelope_of_path(request, request.app[SERVICES].defect())


def _misdirected(request: web.Request, error: web.HTTPException) -> web.Response:
    """Answer a request without a route: with OpenAI's error on its paths, with a tip on paths of other servers.

    Else with an empty 404 or 405, as in TGI.
    """
    response = web.Response(status=error.status)
    is_foreign = isinstance(error, web.HTTPNotFound) and not _is_strict(request)
    if is_foreign and (tip := foreign_route(request.path)):
        response = _in_envelope_of_path(request, ForeignPath(request.path, tip))
    elif _is_openais(request):
        if isinstance(error, web.HTTPNotFound):
            response = _in_envelope_of_path(request, UnknownPath(request.path))
        elif isinstance(error, web.HTTPMethodNotAllowed):
            wrong = WrongMethod(request.method, request.path)
            response = _in_envelope_of_path(request, wrong)
    if allow := error.headers.get("allow"):
        response.headers["allow"] = allow
    return response


def _in_envelope_of_path(request: web.Request, error: RouterError) -> web.Response:
    return _in_envelope(request.path, error, request.app[SERVICES], request[REQUEST_ID])


def _in_envelope(
    path: str, error: RouterError, services: Services, request_id: str
) -> web.Response:
    if is_of_messages(path):
        return refusal(request_id, error)
    response = error_response(error)
    if path.startswith(OPENAI_PREFIX) and not services.dialect.has_tgi_errors:
        response.body = orjson.dumps(error_answer(error))
    return response


def _is_openais(request: web.Request) -> bool:
    return request.path.startswith(OPENAI_PREFIX) and not _is_strict(request)


def _is_strict(request: web.Request) -> bool:
    return request.app[SERVICES].dialect.has_tgi_errors


@web.middleware
async def refuse_generation(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what generates text before anything else about it can be wrong: the model has another task."""
    if request.method == "POST" and _path_of(request) in GENERATING_PATHS:
        services = request.app[SERVICES]
        try:
            with counting_refusals(services.metrics):
                check_task(Task.GENERATE, services.limits)
        except WrongTask as error:
            return _in_envelope_of_path(request, error)
    return await handler(request)


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer the preflight requests of browsers; every OPTIONS counts as one."""
    if request.method != "OPTIONS":
        return await handler(request)
    requested_headers = request.headers.get("access-control-request-headers", "")
    if not (requested_headers.isascii() and requested_headers.isprintable()):
        requested_headers = ""
    return web.Response(
        headers={
            "access-control-allow-methods": "GET,POST",
            # Browsers do not apply `*` to `Authorization`.
            "access-control-allow-headers": requested_headers or ALLOWED_HEADERS,
        }
    )


def allow_origins(origins: tuple[str, ...]) -> ResponseHook:
    """Make the hook that sends the allowed origins to browsers; no origins means any."""

    async def hook(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("origin")
        of_handler = response.headers.get("vary")
        response.headers["vary"] = f"{of_handler}, {VARY}" if of_handler else VARY
        response.headers["access-control-expose-headers"] = "*"
        if not origins or "*" in origins:
            response.headers["access-control-allow-origin"] = "*"
        elif origin in origins:
            response.headers["access-control-allow-origin"] = origin

    return hook


def report_load(load: LoadReport) -> ResponseHook:
    """Make the hook that adds ORCA's report to the answers of requests with its header."""

    async def hook(request: web.Request, response: web.StreamResponse) -> None:
        form = request.headers.get(FORMAT_HEADER)
        if form is not None and (report := load.render(form)) is not None:
            response.headers[REPORT_HEADER] = report

    return hook


def require_key(keys: ApiKeys, open_paths: Collection[str]) -> Middleware:
    """Make the middleware that answers requests without a right key with 401, except reads of `open_paths`.

    The key is a bearer token, or the header `x-api-key`, which Anthropic's clients send.
    """

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.http_exception is not None or _reads(request, open_paths):
            return await handler(request)
        if request.path in ADMIN_PATHS:
            # Their own wrapper checks the admin key.
            return await handler(request)
        name = keys.name_of(request.headers)
        if name is None:
            return (
                unauthorized(request) if is_of_messages(request.path) else web.Response(status=401)
            )
        if name:
            request[KEY_NAME] = name
        return await handler(request)

    return check_key


def _open_paths(config: RouterConfig) -> frozenset[str]:
    """Return `OPEN_PATHS`, with the platform's path of health unless that is another route."""
    health = config.aip_health_route
    if health is None or any(operation.path == health for operation in OPERATIONS):
        return OPEN_PATHS
    return OPEN_PATHS | {health}


def _reads(request: web.Request, paths: Collection[str]) -> bool:
    return request.method in {"GET", "HEAD"} and _path_of(request) in paths


def _path_of(request: web.Request) -> str | None:
    """Return the path of the route, with the names of its parts."""
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical
