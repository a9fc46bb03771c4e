"""The HTTP application: routes, and what holds for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hmac import compare_digest

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from millrace_router.access_log import access_log, add_request_id
from millrace_router.bodies import error_response
from millrace_router.errors import RouterError
from millrace_router.idempotency import Runs
from millrace_router.routes import estimate, native, openai, operations, schema
from millrace_router.routes.keyed import RUNS, end_runs
from millrace_router.services import SERVICES, Services

OPEN_PATHS = frozenset(
    {
        "/health",
        "/ping",
        "/livez",
        "/readyz",
        "/metrics",
        "/info",
        "/v1/models",
        "/api-doc/openapi.json",
        "/openapi.json",
    }
)
ALLOWED_HEADERS = (
    "content-type,authorization,x-priority,x-tenant,x-max-queue-ms,idempotency-key,last-event-id"
)
RESPONSE_SECONDS = 5.0
"""What answers that are being written get at the end, when no generation runs any more."""
VARY = "origin, access-control-request-method, access-control-request-headers"

log = structlog.get_logger(__name__)


def create_app(services: Services) -> web.Application:
    """Assemble the application; its state is `services` alone."""
    config = services.config
    middlewares: list[Middleware] = [access_log, answer_preflight, describe_errors]
    if config.api_key is not None:
        middlewares.append(require_key(config.api_key))
    app = web.Application(middlewares=middlewares, client_max_size=config.payload_limit)
    app[SERVICES] = services
    app[RUNS] = Runs(config.resume_grace)
    app.on_cleanup.append(end_runs)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(allow_origins(config.cors_allow_origin))
    native.register(app)
    operations.register(app)
    openai.register(app)
    estimate.register(app)
    schema.register(app)
    return app


def create_runner(services: Services) -> web.AppRunner:
    """Make what serves the application; a handler whose client has gone is cancelled."""
    return web.AppRunner(
        create_app(services),
        handler_cancellation=True,
        access_log=None,
        # `bodies` does it, to answer what cannot be decompressed as any other mistake.
        auto_decompress=False,
        shutdown_timeout=RESPONSE_SECONDS,
    )


@web.middleware
async def describe_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into an answer that says what it was."""
    try:
        return await handler(request)
    except RouterError as error:
        return error_response(error)
    except web.HTTPException as error:
        # 404 and 405 are empty in TGI; the header names what is allowed.
        allow = error.headers.get("allow")
        return web.Response(status=error.status, headers={"allow": allow} if allow else None)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        # The edge of the process: no request may end it.
        log.exception("request failed")
        return error_response(RouterError("Internal server error"))


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell browsers what they may send; any OPTIONS counts as the question."""
    if request.method != "OPTIONS":
        return await handler(request)
    return web.Response(
        headers={
            "access-control-allow-methods": "GET,POST",
            "access-control-allow-headers": ALLOWED_HEADERS,
        }
    )


def allow_origins(
    origins: tuple[str, ...],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Make the hook that tells browsers who may read answers; no origins means anyone."""

    async def hook(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("origin")
        response.headers["vary"] = VARY
        if not origins or "*" in origins:
            response.headers["access-control-allow-origin"] = "*"
        elif origin in origins:
            response.headers["access-control-allow-origin"] = origin

    return hook


def require_key(api_key: str) -> Middleware:
    """Make the middleware that answers an empty 401 without the right key."""
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.http_exception is not None or _is_open(request):
            return await handler(request)
        given = request.headers.get("authorization", "").encode(errors="surrogateescape")
        if not compare_digest(given, expected):
            return web.Response(status=401)
        return await handler(request)

    return check_key


def _is_open(request: web.Request) -> bool:
    path = request.path
    return request.method in {"GET", "HEAD"} and (path == "/" or path in OPEN_PATHS)
